"""What a shard calls in the place of a node: the same, on its parts."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..ir import joint
from ..ir.graphs import tensors
from ..rows.kinds import Kind, Rows
from .layouts import (
    Follower,
    Layout,
    Layouts,
    Operation,
    part_shape,
    value_of,
)
from .own_rows import own_call, start_of
from .picked_experts import lone_call

HEADED = ("query", "key", "value")
SIZED = ("view", "reshape", "expand", "broadcast_to")
SPLITS = ("split", "split_with_sizes", "tensor_split")


class LocalCall(NamedTuple):
    """A node's call on parts.

    args, kwargs: those of the node, with sizes of parts.
    slices: operands of which each shard has all, and reads its part.
    value: what it gives, as fake tensors.
    target: what is called in the place of what the node calls, or None.
    ranged: such a target that is given the shard's number, for its range of a table.
    join: what gives the node's value, of all shards' and of operands, if that is no
        sum and no gather.
    """

    args: Any
    kwargs: Any
    slices: Mapping[fx.Node, Rows]
    value: Any
    target: Any = None
    ranged: Any = None
    join: Operation | None = None

    def on_shard(self, node: Operation, shard: int) -> Operation:
        """What a shard calls in the place of a node's operation."""
        call = node._replace(args=self.args, kwargs=self.kwargs)
        if self.ranged is not None:
            kwargs = {**self.kwargs, "shard": shard}
            return call._replace(op="call_function", target=self.ranged, kwargs=kwargs)
        if self.target is None:
            return call
        return call._replace(op="call_function", target=self.target)


def local_call(
    follower: Follower,
    call: Operation,
    known: Layouts,
    parts: Mapping[fx.Node, Any],
    layout: Layout,
) -> LocalCall | None:
    """The call that gives a shard's part of a value; None if there is none.

    known: how operands are laid out, `parts` what they are then.
    """
    special = _special(follower, call, known)
    if special is not None:
        return special
    wanted = [
        part_shape(tensor.shape, rows, follower.shards)
        for tensor, rows in zip(tensors(call.value), layout, strict=True)
    ]
    told = follower.slices(call, known)
    every = [*_slices(follower, call, known, layout)] if told is None else [told]
    single = any(
        1 in _lengths(tensors(value_of(read)), known[read], follower.shards)
        for read in known
    )
    if single:
        # of parts of length 1 wrong shapes broadcast: as much as rules allow is cut
        every.reverse()
    for slices in every:
        values = dict(parts)
        for read, rows in slices.items():
            values[read] = follower.part(read.meta["val"], (rows,))
        if not _keeps_groups(call, values):
            continue
        if single and slices:
            all_cut = {read: (rows,) for read, rows in slices.items()}
            if follower.layout(call, {**known, **all_cut}) != layout:
                continue
        for args, kwargs in _variants(call, wanted, follower.shards):
            given = fx.map_arg((args, kwargs), partial(_given, values))
            try:
                with torch.no_grad():
                    value = follower.run(call, *given)
            except Exception:  # sizes that don't fit
                continue
            if [list(map(int, t.shape)) for t in tensors(value)] == wanted:
                return LocalCall(args, kwargs, slices, value)
    return None


def _special(follower: Follower, call: Operation, known: Layouts) -> LocalCall | None:
    """Of calls that pick experts, or rows of the whole batch; None of others."""
    if call.target is joint.part:
        return LocalCall(call.args, call.kwargs, {}, call.value)
    args = lone_call(call, known, follower.shards)
    if args is not None:
        return LocalCall(args, {}, {}, call.value)
    start = start_of(call, known, follower.shards)
    if start is None:
        return None
    target, args = own_call(follower, call, start)
    cut = {} if start.weights in known else {start.weights: Rows(Kind.APART, 0)}
    return LocalCall(args, {}, cut, call.value, target)


def _lengths(values: Iterable[Tensor], layout: Layout, shards: int) -> Iterator[int]:
    """How long parts are in the dimension that is cut."""
    for tensor, rows in zip(values, layout, strict=True):
        if rows.kind is Kind.APART:
            yield int(tensor.shape[rows.dim]) // shards


def _keeps_groups(call: Operation, values: Mapping[fx.Node, Any]) -> bool:
    """Whether as many heads of queries share a head of keys and values as before: else
    attention has the right shape, and other pairs of heads."""
    if call.target is not F.scaled_dot_product_attention:
        return True
    given = dict(zip(HEADED, call.args, strict=False)) | call.kwargs
    whole = [value_of(given[name]).shape for name in HEADED]
    part = [_given(values, given[name]).shape for name in HEADED]
    return len(whole[0]) < 4 or all(
        whole[0][-3] * part[i][-3] == whole[i][-3] * part[0][-3] for i in (1, 2)
    )


def _given(values: Mapping[fx.Node, Any], node: fx.Node) -> Any:
    """What a call gets of a node: its part, if it has one."""
    return values[node] if node in values else value_of(node)


def _slices(
    follower: Follower, call: Operation, known: Layouts, layout: Layout
) -> Iterator[dict[fx.Node, Rows]]:
    """Parts that whole operands may be read by: of none, then of some that are as long,
    in a dimension, as what is cut."""
    cut = {
        (int(tensor.shape[rows.dim]), rows.outer)
        for value, layouts in (
            (call.value, layout),
            *((value_of(read), known[read]) for read in known),
        )
        for tensor, rows in zip(tensors(value), layouts, strict=True)
        if rows.kind is Kind.APART
    }
    choices: list[list[tuple[fx.Node, Rows] | None]] = []
    for read in call.reads:
        value = value_of(read)
        if read in known or not isinstance(value, Tensor):
            continue
        found = [
            (read, Rows(Kind.APART, dim, outer))
            for dim, size in enumerate(value.shape)
            for length, outer in sorted(cut)
            if size == length and size % (outer * follower.shards) == 0
        ]
        if found:
            choices.append([None, *found])
    combinations = product(*choices)
    for chosen in sorted(
        combinations, key=lambda c: sum(each is not None for each in c)
    ):
        yield dict(each for each in chosen if each is not None)


def _variants(
    call: Operation, wanted: Sequence[list[int]], shards: int
) -> Iterator[tuple[Any, Any]]:
    """The arguments of a call, and those with the sizes of parts."""
    args, kwargs = call.args, call.kwargs
    name = str(getattr(call.target, "__name__", call.target)).split(".")[0]
    if name == "group_norm" and wanted[0][1] < int(call.value.shape[1]):
        # by groups of the same size
        groups = kwargs.get("num_groups", args[1] if len(args) > 1 else 1) // shards
        if len(args) > 1:
            yield (args[0], groups, *args[2:]), kwargs
        else:
            yield args, {**kwargs, "num_groups": groups}
        return
    yield args, kwargs
    if name in SIZED and wanted:
        if len(args) > 1 and isinstance(args[1], (tuple, list)):
            yield (args[0], tuple(wanted[0]), *args[2:]), kwargs
        elif "size" in kwargs or "shape" in kwargs:
            key = "size" if "size" in kwargs else "shape"
            yield args, {**kwargs, key: tuple(wanted[0])}
        else:
            yield (args[0], *wanted[0]), kwargs
    if name == "unflatten" and wanted and len(args) == 3:
        dim = args[1] % value_of(args[0]).dim()
        count = len(args[2])
        yield (args[0], args[1], tuple(wanted[0][dim : dim + count])), kwargs
    if name in SPLITS and len(args) > 1:
        sizes = args[1]
        fewer = (
            [size // shards for size in sizes]
            if isinstance(sizes, (tuple, list))
            else sizes // shards
        )
        yield (args[0], fewer, *args[2:]), kwargs
    if call.target is operator.getitem:
        yield (args[0], _less(args, shards)), kwargs


def _less(args: Any, shards: int) -> Any:
    """An index, with slices of parts, along every dimension that has one."""

    def each(index: Any) -> Any:
        if not isinstance(index, slice):
            return index
        ends = (index.start, index.stop)
        if any(end is not None and (end % shards) for end in ends):
            return index
        start, stop = (end and end // shards for end in ends)
        return slice(start, stop, index.step)

    index = args[1]
    return tuple(map(each, index)) if isinstance(index, tuple) else each(index)
