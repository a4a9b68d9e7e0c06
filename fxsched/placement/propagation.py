"""What follows from cutting some weights: the region that runs in parts then."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from ..ir.graphs import name_of
from ..ir.meta import of_node
from ..ir.parts import WeightCut
from .chosen_experts import is_selection, why_picked
from .kinds import Kind, Rows
from .layouts import (
    AROUND,
    WORD,
    Follower,
    Layout,
    Operation,
    draws_itself,
    equal_parts,
    in_flow,
    is_part,
    is_plain,
    is_stack,
    is_weight,
    matrices,
    value_of,
    where,
    why_whole,
)
from .local_calls import local_call
from .own_rows import as_sums, is_lone, is_sum, numbers_of, picked_beside
from .region import AliasGroups, Region

RESHAPES = ("view", "reshape", "unflatten")
MOST = 24  # nodes between a weight and what its values meet


class Propagation:
    """Finds the region of some weights.

    whole: nodes that stay as they are, as what writes into buffers does.
    aliases: those that no shard tells apart. weighed: those that come of weights.
    uncut: positions of weights that stay whole; wants: of the others, those to cut.
    reasons, stops: why weights that were tried were not cut, and at which node.
    """

    def __init__(
        self, gm: fx.GraphModule, follower: Follower, uncut: Container[int] = ()
    ) -> None:
        self.follower, self.uncut = follower, uncut
        self.nodes = in_flow(gm.graph.nodes)
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.aliases = AliasGroups.of(self.nodes)
        around = {node for node in self.nodes if node.target in AROUND}
        self.whole = around | self.aliases.kept
        self.weighed: set[fx.Node] = set()
        for node in self.nodes:
            reads = node.all_input_nodes
            if any(is_weight(n) or n in self.weighed for n in reads):
                self.weighed.add(node)
        self.reasons: dict[fx.Node, str] = {}
        self.stops: dict[fx.Node, fx.Node] = {}
        self.wants: Callable[[fx.Node], bool] = lambda weight: True

    def may_cut(self, weight: fx.Node) -> bool:
        """Whether a weight may be cut."""
        return of_node(weight)["index"] not in self.uncut and self.wants(weight)

    def grow(self, seeds: Mapping[fx.Node, Rows], gathers: bool) -> Region | None:
        """The region of these weights, and of those that come with them: where a whole
        value meets a part, the weight that it is made by is cut too.

        gathers: whether values may be gathered; if not, None where one has to be that
            the model doesn't return.
        """
        cut = [weight for weight in seeds if not is_lone((seeds[weight],))]
        if any(of_node(weight)["index"] in self.uncut for weight in cut):
            return None
        region, tried = self._spread(seeds, gathers), set[fx.Node]()
        while region is not None:
            more = self._behind(region, tried)
            if not more:
                return region
            tried |= set(more)
            every = [more, *({weight: rows} for weight, rows in more.items())]
            for some in every if len(more) > 1 else [more]:
                larger = self._spread({**seeds, **some}, gathers)
                if larger:
                    region, seeds = larger, {**seeds, **some}
                    break
        return None

    def word(self, node: fx.Node, weight: fx.Node, dim: int) -> str | None:
        """What cutting a weight that a node reads along a dimension is: "column" if its
        product is cut then, "row" if it is a sum."""
        call = Operation.of(node)
        if call.bias is not None:
            call = call.unbiased
        layout = self.follower.layout(call, {weight: (Rows(Kind.SHARD, dim),)})
        if not is_plain(layout):
            return None
        if is_part(layout):
            return "column"
        return "row" if {rows.kind for rows in layout} == {Kind.SUM} else None

    def told(self, region: Region) -> Iterator[WeightCut]:
        """What is said of the model's matrices, in the order in which they are read."""
        for weight in dict.fromkeys(w for n in self.nodes for w in matrices(n)):
            shape = tuple(map(int, value_of(weight).shape))
            if weight in region.weights:
                dim = region.weights[weight].dim
                words = (self.word(node, weight, dim) for node in weight.users)
                word = next(filter(None, words), "part")
                stacks = [node for node in weight.users if is_stack(node, weight)]
                alone = is_lone((region.weights[weight],))
                word = WORD if alone or (stacks and dim == 0) else word
                parts = self.follower.shards
                yield WeightCut(of_node(weight)["name"], shape, word, parts=parts)
            else:
                why = self.reasons.get(weight, "it isn't named")
                why = why_whole(weight, self.follower.shards, why)
                yield WeightCut(of_node(weight)["name"], shape, "whole", why)

    def _behind(self, region: Region, tried: set[fx.Node]) -> dict[fx.Node, Rows]:
        """Weights that make whole values, parts of which are read."""
        found: dict[fx.Node, Rows] = {}
        for node in region.calls:
            for read, rows in region.calls[node].slices.items():
                for maker, weight in self._makers(read):
                    fresh = weight not in region.weights and weight not in tried
                    ways = self._columns(maker, weight, rows.outer) if fresh else []
                    if ways and self.may_cut(weight):
                        found[weight] = ways[0]
            for weight in picked_beside(
                region.layouts[node], self._whole_makers(region, node)
            ):
                if weight not in tried and self.may_cut(weight):
                    found[weight] = Rows(Kind.SHARD, 0)
        return found

    def _whole_makers(
        self, region: Region, node: fx.Node
    ) -> Iterator[tuple[fx.Node, fx.Node]]:
        """The makers of what a node in parts reads as a whole."""
        for read in node.all_input_nodes:
            if read not in region.layouts:
                yield from self._makers(read)

    def _makers(self, value: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
        """The nodes that read matrices of the model which a value comes from, with
        these; none if it comes through other weights, or from far."""
        found, queue = list[tuple[fx.Node, fx.Node]](), [value]
        seen = set[fx.Node]()
        while queue:
            node = queue.pop()
            if node in seen or node not in self.weighed:
                continue
            seen.add(node)
            own = matrices(node)
            weights = any(map(is_weight, node.all_input_nodes))
            if len(seen) > MOST or (weights and len(own) != 1):
                return []
            if own:
                found.append((node, own[0]))
            else:
                queue += node.all_input_nodes
        return found

    def _columns(self, node: fx.Node, weight: fx.Node, outer: int) -> list[Rows]:
        """The ways to cut a weight by which what a node makes of it is in parts."""
        found = []
        for rows in equal_parts(value_of(weight).shape, self.follower.shards):
            if rows.outer == outer:
                cut = {weight: (rows,)}
                layout = self.follower.layout(Operation.of(node), cut)
                if is_plain(layout) and is_part(layout):
                    found.append(rows)
        return found

    def _spread(self, seeds: Mapping[fx.Node, Rows], gathers: bool) -> Region | None:
        before, held = self.whole, set[fx.Node]()
        try:
            while True:  # what is torn stays whole
                region = self._spread_once(seeds, gathers)
                held = self.aliases.torn(region) if region is not None else set()
                if not held:
                    return region
                self.whole = self.whole | held
        finally:
            self.whole = before

    def _spread_once(
        self, seeds: Mapping[fx.Node, Rows], gathers: bool
    ) -> Region | None:
        region = Region(dict(seeds))
        first = min(self.place[user] for weight in seeds for user in weight.users)
        parts: dict[fx.Node, Any] = {
            weight: self.follower.part(value_of(weight), (rows,))
            for weight, rows in seeds.items()
        }
        for node in self.nodes[first:]:
            reads = [n for n in node.all_input_nodes if n in parts]
            if reads and not self._join(region, node, reads, parts, gathers):
                known = {n: self._layout(region, n) for n in reads}
                for weight in seeds:
                    self.reasons[weight] = self._reason(node, weight, known)
                    self.stops[weight] = node
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
        sums = {n for n in known if is_sum(known[n])}
        if node.op != "output" and node not in self.whole:
            due = any(map(region.waits, known))
            if not due and self._call(region, node, known, parts):
                return True
            zeroed, own = as_sums(known)
            kept = not due and self.aliases.written.isdisjoint(own)
            if own and kept and self._call(region, node, zeroed, parts):
                for read in own:
                    region.zeroed.setdefault(read, set()).add(node)
                return True
            fewer = {n: layout for n, layout in known.items() if n not in sums}
            if sums and (not fewer or self._call(region, node, fewer, parts)):
                _gather(region, node, sums)
                return True
        rest = set(known) - sums
        gathers = gathers and self._has_rule(node, known)
        if rest and node.op != "output" and not gathers:
            return False
        if rest & set(region.weights) or any(is_lone(known[n]) for n in rest):
            return False
        _gather(region, node, known)
        return True

    def _reason(
        self, node: fx.Node, weight: fx.Node, known: Mapping[fx.Node, Layout]
    ) -> str:
        """Why a node stops a weight from being cut."""
        what = "it" if weight in known else "what it makes"
        if draws_itself(node):
            return f"random numbers are drawn for all of {what} by {where(node)}"
        if is_selection(node):
            return why_picked(node)
        if self._has_rule(node, known):
            return f"all of {what} is read by {where(node)}"
        if name_of(node.target) in RESHAPES:
            shards = self.follower.shards
            return f"heads or blocks in {where(node)} don't divide by {shards}"
        return f"{where(node)} has no rule for parts of {what}"

    def _has_rule(self, node: fx.Node, known: Mapping[fx.Node, Layout]) -> bool:
        """Whether it is known what becomes of parts, be it that they are mixed."""
        if node.op == "output" or node in self.whole:
            return True
        layout = self.follower.layout(Operation.of(node), known)
        return all(rows.kind is not Kind.UNKNOWN for rows in layout)

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
        if draws_itself(node):
            return False
        operation, bias = Operation.of(node), Operation.of(node).bias
        layout = self.follower.layout(operation, known)
        beside = not is_plain(layout) and bias is not None and bias not in known
        if beside:
            operation = operation.unbiased
            layout = self.follower.layout(operation, known)
        kinds = {rows.kind for rows in layout}
        if not is_plain(layout) or kinds == {Kind.REPLICATE}:
            return False
        if not layout and any(is_sum(known[n]) for n in known):  # a write, once a shard
            return False
        if not self.aliases.written.isdisjoint(numbers_of(layout)):
            return False
        if beside and kinds != {Kind.SUM}:
            return False
        read = {n: parts[n] for n in known if n in operation.reads}
        call = local_call(self.follower, operation, known, read, layout)
        if call is None or not all(map(self.may_cut, filter(is_weight, call.slices))):
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


def _gather(region: Region, node: fx.Node, reads: Iterable[fx.Node]) -> None:
    """Notes that a node reads all of some values."""
    for read in reads:
        region.gathered.setdefault(read, set()).add(node)
