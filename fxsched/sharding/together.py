"""Nodes that no shard tells apart: what touches memory that is written into, with all
that lies between. They are in one piece of a stage, so that all is done in the model's
order, and no microbatch sees half of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import networkx as nx
from torch import fx

from ..ir.graphs import storage, tensors
from ..ir.writes import touching
from .region import Region


class Together(NamedTuple):
    """Of a model. written: what touches memory that is written into. kept: of these,
    what touches the model's buffers, which shard 0 alone has. groups: of the same and
    what lies between, two nodes or more each."""

    written: set[fx.Node]
    kept: set[fx.Node]
    groups: list[set[fx.Node]]

    @staticmethod
    def of(nodes: Sequence[fx.Node]) -> Together:
        found = touching(nodes)
        inputs = [n for n in nodes if n.op == "placeholder"]
        kept = {storage(t) for n in inputs for t in tensors(n.meta.get("val"))}
        flow: nx.DiGraph[fx.Node] = nx.DiGraph()
        flow.add_edges_from((read, n) for n in nodes for read in n.all_input_nodes)
        for group in found.values():  # a cycle through its members keeps it together
            flow.add_edges_from(zip(group, group[1:] + group[:1], strict=True))
        return Together(
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
