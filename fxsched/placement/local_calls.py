"""What a shard calls in the place of a node: the same, on its parts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..ir import joint
from ..ir.graphs import name_of, named_arguments, tensors
from ..ir.meta import of_node
from ..ir.shard_calls import (
    cross_entropy_of_parts,
    cross_entropy_part,
    embedding_part,
)
from .chosen_experts import lone_call
from .kinds import Kind, Rows
from .layouts import (
    Each,
    Follower,
    Layout,
    Layouts,
    Operation,
    laid_out,
    lookup_of,
    loss_of,
    part_shape,
    value_of,
    vocabulary_layout,
)
from .own_rows import own_call, start_of

# Arguments that are the shape of what is made, or lengths along a dimension.
SHAPES = ("size", "shape")
LENGTHS = (
    *("split_size", "split_sizes", "indices"),
    *("start", "end", "length", "num_groups"),
)
ENDS = (None, sys.maxsize)  # of a slice that goes on to the end


class LocalCall(NamedTuple):
    """A node's call on parts.

    args, kwargs: those of the node, with sizes of parts; or Each.
    slices: operands of which each shard has all, and reads its part.
    value: what it gives, as fake tensors.
    target: what is called in the place of what the node calls, or None.
    join: what gives the node's value, of all shards' and of operands, if that is no
        sum and no gather.
    """

    args: Any
    kwargs: Any
    slices: Mapping[fx.Node, Rows]
    value: Any
    target: Any = None
    join: Operation | None = None

    @property
    def ranged(self) -> bool:
        """Whether it is given the shard's number, for its range of a table."""
        return "shard" in self.kwargs

    def on_shard(self, node: Operation, shard: int) -> Operation:
        """What a shard calls in the place of a node's operation."""
        args = tuple(Each.of(each, shard) for each in self.args)
        kwargs = {key: Each.of(each, shard) for key, each in self.kwargs.items()}
        if self.target is not None:
            node = node._replace(op="call_function", target=self.target)
        return node._replace(args=args, kwargs=kwargs)


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
    special = _special(follower, call, known, parts)
    if special is not None:
        return special
    wanted = [
        part_shape(tensor.shape, rows, follower.shards)
        for tensor, rows in zip(tensors(call.value), layout, strict=True)
    ]
    told = follower.slices(call, known)
    every = [*_slices(follower, call, known, layout)] if told is None else [told]
    single = any(
        rows.kind is Kind.SHARD and int(tensor.shape[rows.dim]) // follower.shards == 1
        for tensor, rows in laid_out(known)
    )
    if single:
        # of parts of length 1 wrong shapes broadcast: as much as rules allow is cut
        every.reverse()
    for slices in every:
        values = dict(parts)
        for read, rows in slices.items():
            values[read] = follower.part(of_node(read)["val"], (rows,))
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


def _special(
    follower: Follower, call: Operation, known: Layouts, parts: Mapping[fx.Node, Any]
) -> LocalCall | None:
    """Of calls that pick experts, or rows of the whole batch, or read a vocabulary;
    None of others."""
    layout = vocabulary_layout(call, known)
    if layout is not None and layout[0].kind is Kind.SUM:
        return _of_range(follower, call, parts)
    if call.target is joint.part:
        return LocalCall(call.args, call.kwargs, {}, call.value)
    args = lone_call(call, known, follower.shards)
    if args is not None:
        return LocalCall(args, {}, {}, call.value)
    start = start_of(call, known, follower.shards)
    if start is None:
        return None
    target, args = own_call(follower, call, start)
    cut = {} if start.weights in known else {start.weights: Rows(Kind.SHARD, 0)}
    return LocalCall(args, {}, cut, call.value, target)


def _of_range(
    follower: Follower, call: Operation, parts: Mapping[fx.Node, Any]
) -> LocalCall:
    """The call on a shard's range of a vocabulary."""
    lookup, loss = lookup_of(call), loss_of(call)
    args: tuple[Any, ...]
    shard = {"shard": Each(tuple(range(follower.shards)))}
    if loss is None:
        assert lookup is not None, "no other call has such a layout"
        args = *lookup, follower.shards
        local = LocalCall(args, shard, {}, None, embedding_part)
    else:
        logits, labels, weight, *settings = loss
        size, value = int(value_of(logits).shape[1]) // follower.shards, call.value
        given = labels, weight, size, *settings, value.dtype
        join = Operation("call_function", cross_entropy_of_parts, given, {}, value)
        args = logits, labels, weight, loss.label_smoothing > 0
        local = LocalCall(args, shard, {}, None, cross_entropy_part, join)
    operation = local.on_shard(call, 0)
    args, kwargs = fx.map_arg(
        (operation.args, operation.kwargs), partial(_given, parts)
    )
    with torch.no_grad():
        return local._replace(value=follower.run(operation, args, kwargs))


def _keeps_groups(call: Operation, values: Mapping[fx.Node, Any]) -> bool:
    """Whether as many heads of queries share a head of keys and values as before: else
    attention has the right shape, and other pairs of heads."""
    if name_of(call.target) != "scaled_dot_product_attention":
        return True
    headed = list(named_arguments(call).values())[:3]  # query, key and value
    whole = [value_of(each).shape for each in headed]
    part = [_given(values, each).shape for each in headed]
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
    given = zip(tensors(call.value), layout, strict=True)
    cut = {
        (int(tensor.shape[rows.dim]), rows.outer)
        for tensor, rows in (*given, *laid_out(known))
        if rows.kind is Kind.SHARD
    }
    choices: list[list[tuple[fx.Node, Rows] | None]] = []
    for read in call.reads:
        value = value_of(read)
        if read in known or not isinstance(value, Tensor):
            continue
        found = [
            (read, Rows(Kind.SHARD, dim, outer))
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
    given = named_arguments(call)
    sizes = {
        **{name: wanted[0] for name in SHAPES if name in given and wanted},
        **_fewer({name: given[name] for name in LENGTHS if name in given}, shards),
    }
    if "sizes" in given and wanted:  # that one dimension becomes
        dim = given["dim"] % value_of(given["self"]).dim()
        sizes["sizes"] = wanted[0][dim : dim + len(given["sizes"])]
    args = (sizes.get(name, each) for name, each in zip(given, call.args, strict=False))
    sized = tuple(args), {key: sizes.get(key, call.kwargs[key]) for key in call.kwargs}
    cut = name_of(call.target) == "group_norm" and wanted[0][1] < call.value.shape[1]
    if not cut:  # else into groups of the same size
        yield call.args, call.kwargs
    if sizes:
        yield sized


def _fewer(lengths: Mapping[str, Any], shards: int) -> dict[str, Any]:
    """A part's lengths, or ends; none if they don't divide."""

    def fits(length: Any) -> bool:
        if isinstance(length, (tuple, list)):
            return all(map(fits, length))
        return length in ENDS or (isinstance(length, int) and length % shards == 0)

    def part(length: Any) -> Any:
        if isinstance(length, (tuple, list)):
            return list(map(part, length))
        return length if length in ENDS else length // shards

    if not all(map(fits, lengths.values())):
        return {}
    return {name: part(length) for name, length in lengths.items()}
