"""Proves in which type gradients are added up, and in which they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import fx

from ..ir import ops
from ..ir.graphs import result

SUMS = (ops.accumulate, ops.reduce)


def type_fault(
    rank: int,
    program: fx.GraphModule,
    dtype: torch.dtype | None,
    microbatches: Callable[[fx.Node], set[int]],
) -> str | None:
    """What is wrong with the types of a program's gradients, if anything: of two of a
    weight's the sum is in `dtype` (None for the weight's own), and what the optimizer
    or the user gets in the weight's.

    microbatches: those that a sum adds up, as far as this program shows: the gradients
        that stages give of one may meet in the weight's type, as in autograd.
    """
    for node in program.graph.nodes:
        wanted = {dtype} if dtype is not None else _types(node)
        # of what a user's pass made there is no type
        if node.target not in SUMS or _types(_place(node)) in (set(), wanted):
            continue
        if len(microbatches(node)) > 1:
            return (
                f"worker {rank}: {node} adds up gradients in "
                f"{_names(_place(node))}, not in {', '.join(map(str, wanted))}"
            )
    weights = {
        node.meta["group"]: _types(node)
        for node in program.graph.find_nodes(op="placeholder")
        if "group" in node.meta
    }
    for group, value in _used(program):
        # a worker may keep weights that none of its jobs reads
        if group in weights and not _types(value) <= weights[group]:
            return (
                f"worker {rank}: gradients of group {group} come as {_names(value)}, "
                f"and its weights are {', '.join(map(str, weights[group]))}"
            )
    return None


def _place(node: fx.Node) -> fx.Node:
    """What a sum is made in the place of."""
    sums = node.args if node.target is ops.accumulate else node.args[1:]
    place = sums[0 if node.target is ops.accumulate else int(node.args[0])]  # type: ignore[arg-type]
    assert isinstance(place, fx.Node), "sums are made of values"
    return place


def _used(program: fx.GraphModule) -> Iterator[tuple[int, fx.Node]]:
    """Gradients that the user gets, or an update, by group."""
    returned = result(program)
    for group, value in returned.get("groups", {}).items():
        yield int(group), value
    for node in program.graph.nodes:
        if node.target is ops.update:
            value = node.args[4]
            assert isinstance(value, fx.Node), "an update has gradients"
            yield node.meta["group"], value


def _types(value: fx.Node) -> set[torch.dtype]:
    return {spec.dtype for spec in value.meta.get("specs", ())}


def _names(value: fx.Node) -> str:
    return ", ".join(sorted(map(str, _types(value))))
