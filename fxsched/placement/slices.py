"""What lies between sums, in slices: each shard has some rows of a sequence or batch.

Of a sum each shard adds up its slice alone, norms, dropout and what else keeps rows
apart go on with that, and all is gathered where all is read (Korthikanti et al. 2022,
arXiv 2205.05198): as many bytes as sums on all shards, and the work between them once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import fx

from ..ir import joint
from ..ir.meta import of_node
from ..jobs.job import PlanError
from .demand import Demand
from .kinds import Kind, Rows
from .layouts import (
    Layout,
    Operation,
    draws_itself,
    is_plain,
    is_weight,
    value_of,
    where,
)
from .local_calls import LocalCall, local_call
from .propagation import Propagation
from .region import Region

# Along which values are sliced: of a batch, a sequence, their features.
DIMS = (0, 1, 2)


def variants(
    propagation: Propagation, region: Region, slices: list[str] | None = None
) -> list[Region]:
    """The ways in which a region can run, of which the fastest is to be taken.

    slices: patterns of names of modules whose norms and the like are to be in slices;
        None for all, where that is faster.
    Raises PlanError for names of modules that nothing can be sliced in.
    """
    if slices is None:
        ways = [region, *_sliced(propagation, region, lambda node: True)[:1]]
    else:
        ways = _named(propagation, region, slices) if slices else [region]
    if propagation.follower.shards > 2:
        ways += [_sums_in_slices(propagation, each) for each in ways]
    return ways


def _sliced(
    propagation: Propagation, region: Region, may: Callable[[fx.Node], bool]
) -> list[Region]:
    """The region in slices along each dimension, that of the most nodes first."""
    every = [_in_slices(propagation, region, dim, may) for dim in DIMS]
    some = [each for each in every if each.scattered]
    return sorted(some, key=lambda each: -len(each.layouts))


def _named(
    propagation: Propagation, region: Region, patterns: list[str]
) -> list[Region]:
    """The ways in which something of each module that is named is in slices."""

    def may(node: fx.Node) -> bool:
        return _is_in(node, patterns) or not any(map(is_weight, node.all_input_nodes))

    ways = _sliced(propagation, region, may)
    for pattern in patterns:
        fits = [
            way
            for way in ways
            if any(_is_in(n, [pattern]) for n in way.layouts.keys() - region.layouts)
        ]
        if not fits:
            raise PlanError(
                f"shards={{{pattern!r}: 'sequence'}}: no operation in modules of that "
                "name reads a sum over shards whose rows divide by "
                f"{propagation.follower.shards}; name norms and dropout between "
                "weights that are cut"
            )
        ways = fits
    return ways[:1]


def _is_in(node: fx.Node, patterns: list[str]) -> bool:
    name = str(of_node(node)["module"])
    return any(
        fnmatchcase(name, each) or fnmatchcase(name, f"{each}.*") for each in patterns
    )


def slices_text(way: Region, region: Region) -> str:
    """What is said of a way in which a region runs; "" if nothing is in slices."""
    between = [node for node in way.layouts if node not in region.layouts]
    if between:
        first, dim = between[0], way.layouts[between[0]][0].dim
        several = f"{len(between)} operations" if between[1:] else "one operation"
        return (
            f"between sums, each shard computes one slice of dimension {dim} in "
            f"{several}, such as {where(first)}"
        )
    if way.scattered:
        count = len(way.scattered)
        sums = f"{count} sums are" if count > 1 else "one sum is"
        return f"{sums} computed in slices, one on each shard; all shards gather them"
    return ""


def _in_slices(
    propagation: Propagation, region: Region, dim: int, may: Callable[[fx.Node], bool]
) -> Region:
    """A region, with all that may be between its sums in slices along a dimension.

    may: of nodes that could be, which may.
    """
    demand, parts = Demand(propagation, region), dict[fx.Node, Any]()
    sliced: dict[fx.Node, Layout] = {}
    calls: dict[fx.Node, LocalCall] = {}
    for node in propagation.nodes:
        if node in region.layouts:
            rows = _sum_slice(propagation, region, node, dim)
            if rows is not None:
                sliced[node] = (rows,)
                parts[node] = propagation.follower.part(value_of(node), (rows,))
        elif node in demand.spread and may(node):
            reads = {n: sliced[n] for n in node.all_input_nodes if n in sliced}
            found = _call(propagation, node, reads, parts) if reads else None
            if found is not None:
                sliced[node], calls[node] = found
                parts[node] = calls[node].value
    return _with_slices(region, sliced, calls)


def _sum_slice(
    propagation: Propagation, region: Region, node: fx.Node, dim: int
) -> Rows | None:
    """How a sum that others read is cut along a dimension; None if it isn't one, or
    doesn't divide."""
    waits = node in region.joined or node.target is joint.part
    if waits or node not in region.gathered:
        return None
    if [rows.kind for rows in region.layouts[node]] != [Kind.SUM]:
        return None
    value, shards = value_of(node), propagation.follower.shards
    fits = dim < value.dim() and int(value.shape[dim]) % shards == 0
    return Rows(Kind.SHARD, dim) if fits else None


def _sums_in_slices(propagation: Propagation, region: Region) -> Region:
    """A region whose sums that several shards read are made in slices, which all then
    gather: fewer bytes than all parts on all, if there are more than two."""
    new, demand = region.copy(), Demand(propagation, region)
    for node in region.summed:
        ways = (_sum_slice(propagation, region, node, dim) for dim in DIMS)
        rows = next((each for each in ways if each is not None), None)
        if rows is not None and len(demand.wanted[node]) > 1:
            new.scattered.setdefault(node, rows)
    return new


def _call(
    propagation: Propagation,
    node: fx.Node,
    reads: Mapping[fx.Node, Layout],
    parts: Mapping[fx.Node, Any],
) -> tuple[Layout, LocalCall] | None:
    """What a node has and calls in slices; None if it can't."""
    if draws_itself(node):
        return None
    operation, follower = Operation.of(node), propagation.follower
    layout = follower.layout(operation, reads)
    if not is_plain(layout) or {rows.kind for rows in layout} != {Kind.SHARD}:
        return None
    values = {n: parts[n] for n in reads}
    call = local_call(follower, operation, reads, values, layout)
    if call is None or any(map(is_weight, call.slices)):
        return None
    return layout, call


def _with_slices(
    region: Region, sliced: Mapping[fx.Node, Layout], calls: Mapping[fx.Node, LocalCall]
) -> Region:
    """A region with these nodes in it, and its sums that they read in slices."""
    new = region.copy()
    new.layouts.update({node: sliced[node] for node in calls})
    new.calls.update(calls)
    for node in sliced:
        if node in calls:
            others = node.users.keys() - calls.keys()
            if others:
                new.gathered[node] = others
            continue
        readers = region.gathered[node] & calls.keys()
        if readers:
            (new.scattered[node],) = sliced[node]
            new.sliced[node] = readers
            new.gathered[node] -= readers
    return new
