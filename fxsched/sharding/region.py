"""What follows from cutting some weights: a region of the model that runs in parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx

from ..ir.graphs import REGION_ENTERS, REGION_EXITS, Role, storage, tensors, touches
from ..rows.kinds import Kind, Rows
from .layouts import Follower, Layout, Operation, is_plain, value_of
from .local_calls import LocalCall, local_call

MOST = 24  # nodes between a weight and what its values meet


@dataclass
class Region:
    """Nodes that run in parts.

    weights: how weights are cut.
    layouts, calls: of each node that runs in parts, what it has and what it calls.
    summed: the nodes whose sum others read, gathered: those of which others read all
        parts, each with these readers.
    unbiased: those of them whose bias is added to the sum.
    """

    weights: dict[fx.Node, Rows]
    layouts: dict[fx.Node, Layout] = field(default_factory=dict)
    calls: dict[fx.Node, LocalCall] = field(default_factory=dict)
    summed: dict[fx.Node, set[fx.Node]] = field(default_factory=dict)
    gathered: dict[fx.Node, set[fx.Node]] = field(default_factory=dict)
    unbiased: set[fx.Node] = field(default_factory=set)

    def whole(self, node: fx.Node, reader: fx.Node) -> bool:
        """Whether a reader takes all of a value that is in parts."""
        return any(
            reader in readers.get(node, ()) for readers in (self.summed, self.gathered)
        )

    def add(self, other: Region) -> None:
        """Takes in another region."""
        for mine, its in zip(self._fields, other._fields, strict=True):
            mine.update(its)
        self.unbiased |= other.unbiased

    @property
    def _fields(self) -> Sequence[dict[fx.Node, Any]]:
        return self.weights, self.layouts, self.calls, self.summed, self.gathered


class Grower:
    """Finds the region of some weights.

    whole: nodes that stay as they are, as what writes into buffers does.
    taken: nodes and weights of other regions.
    """

    def __init__(self, gm: fx.GraphModule, follower: Follower) -> None:
        self.follower = follower
        self.nodes = list(gm.graph.nodes)
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.whole = whole_nodes(self.nodes)
        self.written = written_values(self.nodes)

    def grow(self, seeds: Mapping[fx.Node, Rows], gathers: bool) -> Region | None:
        """The region of these weights, and of those that come with them: where a whole
        value meets a part, the weight that it is made by is cut too.

        gathers: whether values may be gathered; if not, None where one has to be that
            the model doesn't return.
        """
        region, tried = self._spread(seeds, gathers), set[fx.Node]()
        while region is not None:
            more = self._behind(region, tried)
            if not more:
                return region
            tried |= set(more)
            larger = self._spread({**seeds, **more}, gathers)
            region, seeds = (larger, {**seeds, **more}) if larger else (region, seeds)
        return None

    def _behind(self, region: Region, tried: set[fx.Node]) -> dict[fx.Node, Rows]:
        """Weights that make whole values, parts of which are read."""
        found: dict[fx.Node, Rows] = {}
        for node in region.calls:
            for read, rows in region.calls[node].slices.items():
                for weight in makers(read):
                    if weight not in region.weights and weight not in tried:
                        found[weight] = Rows(Kind.APART, 0, rows.outer)
        return found

    def _spread(self, seeds: Mapping[fx.Node, Rows], gathers: bool) -> Region | None:
        region = Region(dict(seeds))
        first = min(self.place[user] for weight in seeds for user in weight.users)
        parts: dict[fx.Node, Any] = {
            weight: self.follower.part(value_of(weight), (rows,))
            for weight, rows in seeds.items()
        }
        for node in self.nodes[first:]:
            reads = [n for n in node.all_input_nodes if n in parts]
            if reads and not self._join(region, node, reads, parts, gathers):
                return None
        return region

    def _join(
        self,
        region: Region,
        node: fx.Node,
        reads: Sequence[fx.Node],
        parts: dict[fx.Node, Any],
        gathers: bool,
    ) -> bool:
        """Takes a node into the region, or lets it read whole values.

        Returns whether that went without a gather, or some are allowed.
        """
        known = {n: self._layout(region, n) for n in reads}
        if node.op != "output" and node not in self.whole:
            due = region.unbiased & set(known)  # a bias waits for the sum
            if not due and self._call(region, node, known, parts):
                return True
            sums = {n for n in known if _is_sum(known[n])}
            fewer = {n: layout for n, layout in known.items() if n not in sums}
            if sums and (not fewer or self._call(region, node, fewer, parts)):
                return self._read_sums(region, node, sums)
        sums = {n for n in known if _is_sum(known[n])}
        rest = set(known) - sums
        if rest and not gathers and node.op != "output":
            return False
        if rest & set(region.weights):
            return False
        for read in rest:
            region.gathered.setdefault(read, set()).add(node)
        return self._read_sums(region, node, sums) and self.written.isdisjoint(rest)

    def _read_sums(self, region: Region, node: fx.Node, sums: Iterable[fx.Node]) -> bool:
        for read in sums:
            region.summed.setdefault(read, set()).add(node)
        return self.written.isdisjoint(sums)

    def _layout(self, region: Region, node: fx.Node) -> Layout:
        if node in region.weights:
            return (region.weights[node],)
        return region.layouts[node]

    def _call(
        self,
        region: Region,
        node: fx.Node,
        known: Mapping[fx.Node, Layout],
        parts: dict[fx.Node, Any],
    ) -> bool:
        """Whether a node runs in parts, its operands laid out so; if it does, it is in
        the region from now on."""
        operation, bias = Operation.of(node), Operation.of(node).bias
        layout = self.follower.layout(operation, known)
        beside = not is_plain(layout) and bias is not None and bias not in known
        if beside:
            operation = operation.unbiased
            layout = self.follower.layout(operation, known)
        kinds = {rows.kind for rows in layout}
        if not is_plain(layout) or kinds == {Kind.SHARED}:
            return False
        if beside and kinds != {Kind.SUM}:
            return False
        read = {n: parts[n] for n in known if n in operation.reads}
        call = local_call(self.follower, operation, known, read, layout)
        if call is None:
            return False
        region.layouts[node], region.calls[node] = layout, call
        parts[node] = call.value
        if beside:
            region.unbiased.add(node)
        for weight, rows in call.slices.items():
            users = (self.place[user] for user in weight.users)
            if is_weight(weight) and min(users) >= self.place[node]:
                region.weights[weight] = rows
                parts[weight] = self.follower.part(value_of(weight), (rows,))
        return True


def _is_sum(layout: Layout) -> bool:
    return any(rows.kind is Kind.SUM for rows in layout)


def makers(value: fx.Node) -> list[fx.Node]:
    """The weights of the linear layers that a value comes from; none if it comes
    through other weights, or from far."""
    found, queue, seen = list[fx.Node](), [value], set[fx.Node]()
    while queue:
        node = queue.pop()
        if node in seen or node.op == "get_attr":
            continue
        seen.add(node)
        if is_weight(node) or len(seen) > MOST:
            return []
        weight = node.args[1] if node.target is F.linear and len(node.args) > 1 else None
        if isinstance(weight, fx.Node) and is_weight(weight):
            found.append(weight)
        else:
            queue += node.all_input_nodes
    return found


def is_weight(node: fx.Node) -> bool:
    """Whether a node is a parameter of the model."""
    return node.meta.get("role") is Role.PARAMETER


def whole_nodes(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Those that write into buffers or inputs, are of the whole batch, or open and
    close regions such as autocast's."""
    inputs = {
        storage(t)
        for n in nodes
        if n.op == "placeholder"
        for t in tensors(n.meta.get("val"))
    }
    return {
        node
        for node in nodes
        if node.target in (*REGION_ENTERS, *REGION_EXITS)
        or node.meta.get("joint")
        or any(storage(t) in inputs for t in node.meta.get("mutates", ()))
    }


def written_values(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Those whose memory is written into, after they are made or as they are."""
    written = {storage(t) for n in nodes for t in n.meta.get("mutates", ())}
    return {
        node
        for node in nodes
        if isinstance(node.meta.get("val"), Tensor)
        and any(touches(node, each) for each in written)
    }
