"""What lies between sums, in slices: each shard has some rows of a sequence or batch.

Of a sum each shard adds up its slice alone, norms, dropout and what else keeps rows
apart go on with that, and all is gathered where all is read (Korthikanti et al. 2022,
arXiv 2205.05198): as many bytes as sums on all shards, and the work between them once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from ..ir import joint
from ..rows.kinds import Kind, Rows
from .demand import Demand
from .grower import Grower
from .layouts import Layout, Operation, is_plain, value_of
from .local_calls import LocalCall, local_call
from .nodes import draws_itself, is_weight
from .region import Region

# Along which values are sliced: of a batch, a sequence, their features.
DIMS = (0, 1, 2)


def in_slices(
    grower: Grower, region: Region, dim: int, may: Callable[[fx.Node], bool]
) -> Region:
    """A region, with all that may be between its sums in slices along a dimension.

    may: of nodes that could be, which may.
    """
    demand, parts = Demand(grower, region), dict[fx.Node, Any]()
    sliced: dict[fx.Node, Layout] = {}
    calls: dict[fx.Node, LocalCall] = {}
    for node in grower.nodes:
        if node in region.layouts:
            rows = sum_slice(grower, region, node, dim)
            if rows is not None:
                sliced[node] = (rows,)
                parts[node] = grower.follower.part(value_of(node), (rows,))
        elif node in demand.spread and may(node):
            reads = {n: sliced[n] for n in node.all_input_nodes if n in sliced}
            found = _call(grower, node, reads, parts) if reads else None
            if found is not None:
                sliced[node], calls[node] = found
                parts[node] = calls[node].value
    return _with_slices(region, sliced, calls)


def sum_slice(grower: Grower, region: Region, node: fx.Node, dim: int) -> Rows | None:
    """How a sum that others read is cut along a dimension; None if it isn't one, or
    doesn't divide."""
    waits = node in region.joined or node.target is joint.part
    if waits or node not in region.gathered:
        return None
    if [rows.kind for rows in region.layouts[node]] != [Kind.SUM]:
        return None
    value, shards = value_of(node), grower.follower.shards
    fits = dim < value.dim() and int(value.shape[dim]) % shards == 0
    return Rows(Kind.APART, dim) if fits else None


def sums_in_slices(grower: Grower, region: Region) -> Region:
    """A region whose sums that several shards read are made in slices, which all then
    gather: fewer bytes than all parts on all, if there are more than two."""
    new, demand = region.copy(), Demand(grower, region)
    for node in region.summed:
        ways = (sum_slice(grower, region, node, dim) for dim in DIMS)
        rows = next((each for each in ways if each is not None), None)
        if rows is not None and len(demand.wanted[node]) > 1:
            new.scattered.setdefault(node, rows)
    return new


def _call(
    grower: Grower,
    node: fx.Node,
    reads: Mapping[fx.Node, Layout],
    parts: Mapping[fx.Node, Any],
) -> tuple[Layout, LocalCall] | None:
    """What a node has and calls in slices; None if it can't."""
    if draws_itself(node):
        return None
    operation, follower = Operation.of(node), grower.follower
    layout = follower.layout(operation, reads)
    if not is_plain(layout) or {rows.kind for rows in layout} != {Kind.APART}:
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
