"""On which shards values are made and read."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ..ir.meta import of_node
from .layouts import Operation, matrices
from .propagation import Propagation
from .region import Region


class Demand:
    """Where the values of a model in parts are.

    wanted: the shards on which the whole of each value is read.
    spread: what each shard that reads it makes, of what it has; all else that isn't in
        parts is made on shard 0.
    levels: how often shards have read each other before a value, the same on all
        shards, so that none waits for more than it reads.
    """

    def __init__(self, propagation: Propagation, region: Region) -> None:
        self.region, self.nodes, self.weighed = (
            region,
            propagation.nodes,
            propagation.weighed,
        )
        self.pinned = propagation.whole.union(
            propagation.aliases.written, *propagation.aliases.groups
        )
        self.every = set(range(propagation.follower.shards))
        self.wanted: dict[fx.Node, set[int]] = {node: set() for node in self.nodes}
        self.spread: set[fx.Node] = set()
        self._note_wanted()
        self.levels = dict.fromkeys(self.nodes, 0)
        self._note_levels(propagation.aliases.groups)

    def makers(self, node: fx.Node) -> set[int]:
        """The shards that make a value, or parts of it."""
        if node in self.region.layouts or "stage" not in of_node(node):
            return self.every
        return self.wanted[node] if node in self.spread else {0}

    def reads_whole(self, node: fx.Node, read: fx.Node) -> bool:
        """Whether a node that runs in parts reads all of a value."""
        cut = read in self.region.layouts or read in self.region.weights
        return not cut or self.region.whole(read, node)

    def is_dealt(self, node: fx.Node, read: fx.Node) -> bool:
        """Whether shard 0 sends each shard its part of a value that a node reads."""
        call = self.region.calls.get(node)
        rows = call and call.slices.get(read)
        made = "stage" in of_node(read) and not of_node(read).get("joint")
        cut = read in self.region.layouts or read not in self.weighed
        return bool(rows and rows.outer == 1 and made and not cut)

    def _note_wanted(self) -> None:
        """Finds out who reads what, the last readers first."""
        near: set[fx.Node] = set()  # what parts go into
        for node in self.nodes:
            reads = node.all_input_nodes
            if any(n in near or n in self.region.layouts for n in reads):
                near.add(node)
        for node in reversed(self.nodes):
            where = self.wanted[node]
            if node.op == "output":
                where = {0}
            elif node in self.region.layouts:
                where = self.every
            elif self._is_spread(node, near):
                self.spread.add(node)
            else:  # what writes is wanted though nothing reads it
                where = {0} if node in self.pinned else {0} & where
            for read in node.all_input_nodes:
                self.wanted[read] |= self._wanted_by(node, read, where)

    def _wanted_by(self, node: fx.Node, read: fx.Node, where: set[int]) -> set[int]:
        """The shards on which a node reads all of a value."""
        if node not in self.region.layouts:
            return where
        if not self.reads_whole(node, read):
            return set()
        if node in self.region.unbiased and read is Operation.of(node).bias:
            return where if node in self.region.scattered else self.wanted[node]
        return {0} if self.is_dealt(node, read) else where

    def _is_spread(self, node: fx.Node, near: set[fx.Node]) -> bool:
        """Whether each shard that reads a value makes it, of what it has."""
        if node in self.pinned or "stage" not in of_node(node):
            return False
        if matrices(node):
            return False
        made = [n for n in node.all_input_nodes if "stage" in of_node(n)]
        return node in near or all(self.wanted[n] >= self.wanted[node] for n in made)

    def _note_levels(self, groups: Sequence[set[fx.Node]]) -> None:
        """Finds out how often shards have read each other, as often before all of a
        group."""
        before: dict[fx.Node, int] = {}
        while before != self.levels:
            before = dict(self.levels)
            for node in self.nodes:
                for read in node.all_input_nodes:
                    since = self.levels[read] + self._rounds(node, read)
                    self.levels[node] = max(since, self.levels[node])
            for group in groups:
                latest = max(self.levels[node] for node in group)
                self.levels.update(dict.fromkeys(group, latest))

    def _rounds(self, node: fx.Node, read: fx.Node) -> int:
        """How often shards read each other from a value to a node that reads it."""
        if read not in self.region.layouts:
            return int(bool(self.makers(node) - self.makers(read)))
        if node in self.region.layouts and not self.reads_whole(node, read):
            return int(node in self.region.sliced.get(read, ()))
        return 2 if read in self.region.scattered else 1
