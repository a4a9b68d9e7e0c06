"""A region of a model that runs in parts, and nodes that none may tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import networkx as nx
from torch import fx

from ..ir.graphs import storage, tensors
from ..ir.meta import of_node
from ..ir.writes import touching
from .kinds import Rows
from .layouts import Layout
from .local_calls import LocalCall
from .own_rows import is_sum


@dataclass
class Region:
    """Nodes that run in parts.

    weights: how weights are cut.
    layouts, calls: of each node that runs in parts, what it has and what it calls.
    gathered: the nodes of which others read the sum, or all parts, sliced: those of
        whose sum others read the slice of their shard, zeroed: those with rows of other
        shards that others, in parts, read as zeros, each with these readers.
    scattered: of sums that are made in slices, each on its shard, how they are cut.
    unbiased: the nodes whose bias is added to the sum.
    """

    weights: dict[fx.Node, Rows]
    layouts: dict[fx.Node, Layout] = field(default_factory=dict)
    calls: dict[fx.Node, LocalCall] = field(default_factory=dict)
    gathered: dict[fx.Node, set[fx.Node]] = field(default_factory=dict)
    sliced: dict[fx.Node, set[fx.Node]] = field(default_factory=dict)
    scattered: dict[fx.Node, Rows] = field(default_factory=dict)
    zeroed: dict[fx.Node, set[fx.Node]] = field(default_factory=dict)
    unbiased: set[fx.Node] = field(default_factory=set)

    def whole(self, node: fx.Node, reader: fx.Node) -> bool:
        """Whether a reader takes all of a value that is in parts."""
        return reader in self.gathered.get(node, ())

    @property
    def summed(self) -> list[fx.Node]:
        """The nodes whose sum others read."""
        return [node for node in self.gathered if is_sum(self.layouts[node])]

    def waits(self, node: fx.Node) -> bool:
        """Whether what shards have of a value is joined before anything is done to it:
        to the sum, a bias is added; no other sum of a table's rows is smaller."""
        ranged = node in self.calls and self.calls[node].ranged
        return node in self.unbiased or ranged

    @property
    def joined(self) -> set[fx.Node]:
        """The nodes whose value is neither the sum nor the parts side by side."""
        return {node for node, call in self.calls.items() if call.join is not None}

    def is_apart(self, other: Region) -> bool:
        """Whether another region has nothing of this one."""
        mine, its = ({*each.layouts, *each.weights} for each in (self, other))
        return mine.isdisjoint(its)

    def take(self, other: Region | None) -> bool:
        """Takes in another region, if there is one that has nothing of this one;
        returns whether it did."""
        if other is None or not self.is_apart(other):
            return False
        for each in fields(self):
            getattr(self, each.name).update(getattr(other, each.name))
        return True

    def copy(self) -> Region:
        """Another, which may be changed."""
        new = Region({})
        new.take(self)
        for readers in (new.gathered, new.sliced, new.zeroed):
            readers.update({node: set(some) for node, some in readers.items()})
        return new


class AliasGroups(NamedTuple):
    """Nodes that no shard tells apart: they are in one piece of a stage, so that all is
    done in the model's order, and no microbatch sees half of it.

    written: what touches memory that is written into. kept: of these, what touches the
    model's buffers, which shard 0 alone has. groups: of the same and what lies between,
    two nodes or more each.
    """

    written: set[fx.Node]
    kept: set[fx.Node]
    groups: list[set[fx.Node]]

    @staticmethod
    def of(nodes: Sequence[fx.Node]) -> AliasGroups:
        found = touching(nodes)
        inputs = [n for n in nodes if n.op == "placeholder"]
        kept = {storage(t) for n in inputs for t in tensors(of_node(n).get("val"))}
        flow: nx.DiGraph[fx.Node] = nx.DiGraph()
        flow.add_edges_from((read, n) for n in nodes for read in n.all_input_nodes)
        for group in found.values():  # a cycle through its members keeps it together
            flow.add_edges_from(zip(group, group[1:] + group[:1], strict=True))
        return AliasGroups(
            {n for group in found.values() for n in group},
            {n for place in found.keys() & kept for n in found[place]},
            [
                set(each)
                for each in nx.strongly_connected_components(flow)
                if len(each) > 1
            ],
        )

    def torn(self, region: Region) -> set[fx.Node]:
        """The groups that a region has some of, or in which shards would read each
        other."""
        return {
            node
            for group in self.groups
            if not group.isdisjoint(region.layouts) and _is_torn(group, region)
            for node in group
        }


def _is_torn(group: set[fx.Node], region: Region) -> bool:
    return not group <= region.layouts.keys() or any(
        region.whole(read, node)
        for node in group
        for read in node.all_input_nodes
        if read in group
    )
