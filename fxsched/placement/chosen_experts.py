"""Experts that each compute the rows which values pick for them, given to shards.

before: chosen_rows([x, where_0, w_0, where_1, w_1]):    # on as many rows as values say
            z = zeros_like(x)
            z = index_add(z, 0, rows_0, x[rows_0] @ w_0)
            z = index_add(z, 0, rows_1, x[rows_1] @ w_1)
after:  chosen_rows([x, where_0, w_0])    # of shard 0, and of shard 1
        chosen_rows([x, where_1, w_1])

The sum of what they give is what the whole did.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from ..ir.dealt_experts import dealt
from ..ir.graphs import Call, tensors
from ..ir.meta import of_node
from .kinds import UNKNOWN, Kind, Rows
from .layouts import Each, Layout, Layouts, Operation, is_weight, value_of

aten = torch.ops.aten


class Lone(NamedTuple):
    """Says that all of a value belongs to one shard; others have what has its shape."""

    shard: int


def is_selection(node: fx.Node) -> bool:
    """Whether a node computes rows that values pick."""
    return node.target is torch.ops.fxsched.chosen_rows.default


def why_picked(node: fx.Node) -> str:
    """Why weights that a selection reads stay whole."""
    where = of_node(node)["module"] or "the model"
    return f"rows are picked by value in {where}, by no experts that can be dealt out"


def lone(shard: int) -> Rows:
    """The layout of what belongs to a shard."""
    return Rows(Kind.OWN, owner=Lone(shard))


def split_selection(call: Operation, shards: int) -> Each | None:
    """What each shard calls of a selection, as (name, values, numbers), if that adds up
    what as many experts give as can be dealt out to shards evenly; None if not."""
    name, values, numbers = call.args
    count = len(values)
    each = dealt(name, shards)
    if not each:
        return None
    return Each(
        tuple(
            (
                new,
                [values[i] for i in used if i < count],
                [numbers[i - count] for i in used if i >= count],
            )
            for new, used in each
        )
    )


def expert_seeds(node: fx.Node, shards: int) -> dict[fx.Node, Rows]:
    """How weights of a selection's experts are laid out: those that one shard alone
    reads are on it, stacks that each reads its own parts of are cut."""
    parts = split_selection(Operation.of(node), shards)
    readers: dict[fx.Node, set[int]] = {}
    for p, (_, values, _) in enumerate(parts.every if parts else ()):
        for value in values:
            readers.setdefault(value, set()).add(p)
    seeds: dict[fx.Node, Rows] = {}
    for value, who in readers.items():
        stack = _stack(value)
        if is_weight(value) and len(who) == 1:
            seeds[value] = lone(*who)
        elif stack and is_weight(stack) and not len(value_of(stack)) % shards:
            seeds[stack] = Rows(Kind.SHARD, 0)
    return seeds


def lone_layout(call: Operation, known: Layouts, shards: int) -> Layout | None:
    """What becomes of what belongs to one shard; None if nothing does."""
    place = _place(call, known, shards)
    if place is not None:
        return (lone(place[0]),)
    layouts = {rows for layout in known.values() for rows in layout}
    if not any(isinstance(rows.owner, Lone) for rows in layouts):
        return None
    count = len(list(tensors(call.value)))
    if call.target is torch.ops.fxsched.chosen_rows.default:
        parts = split_selection(call, shards)
        fit = parts is not None and all(
            known[value] == (lone(p),)
            for p, (_, values, _) in enumerate(parts.every)
            for value in values
            if value in known
        )
        return (Rows(Kind.SUM) if fit else UNKNOWN,) * count
    alone = len(layouts) == 1 and known.keys() == set(call.reads)
    return (layouts.pop(),) * count if alone and count else (UNKNOWN,)


def lone_call(call: Operation, known: Layouts, shards: int) -> tuple[Any, ...] | None:
    """The arguments of a shard's call, of a stack's matrix or a selection; None of what
    has those of the whole."""
    place = _place(call, known, shards)
    if place is not None:
        return call.args[0], 0, place[1]
    if call.target is not torch.ops.fxsched.chosen_rows.default:
        return None
    parts = split_selection(call, shards)
    return parts and tuple(map(Each, zip(*parts.every, strict=True)))


def _place(call: Operation, known: Layouts, shards: int) -> tuple[int, int] | None:
    """The shard that a call's matrix is on, and its number there, of a stack that is
    cut into its matrices."""
    if not _is_matrix(call) or known.get(call.args[0]) != (Rows(Kind.SHARD, 0),):
        return None
    count = int(value_of(call.args[0]).shape[0])
    number: int = call.args[2] % count
    return divmod(number, count // shards)


def _is_matrix(call: Call) -> bool:
    """Whether a call is stack[e]."""
    return call.target is aten.select.int and call.args[1] == 0


def _stack(value: fx.Node) -> fx.Node | None:
    """What a value is a matrix of, as it is or transposed."""
    while len(value.all_input_nodes) == 1:
        if _is_matrix(value):
            return value.all_input_nodes[0]
        (value,) = value.all_input_nodes
    return None
