"""Which operations of a traced graph run on the rows of the whole batch at once.

From the first one that rows of different microbatches meet in, a value is of the whole
batch, until microbatches can go on with their own rows of it. They do where there is
work to share: a matrix product or such.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import Tensor, fx

from .kinds import Kind, Rows, meet
from .tracker import Tracker


class Domains:
    """Finds the joint nodes of a graph whose rows were tracked.

    nodes: of Dynamo's graph, those that compute.
    value: the microbatch's value of each. flops: of each.
    """

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        tracker: Tracker,
        value: Callable[[fx.Node], object],
        flops: Callable[[fx.Node], float],
    ) -> None:
        self.nodes, self.tracker, self.value, self.flops = nodes, tracker, value, flops

    def rows(self, node: fx.Node) -> Rows | None:
        """The rows of a tensor."""
        value = self.value(node)
        return self.tracker.of(value) if isinstance(value, Tensor) else None

    def in_parts(self, node: fx.Node) -> bool:
        """Whether microbatches have this value's rows, one after another."""
        rows = self.rows(node)
        if rows is None or rows.cause is not None or rows.numbers:
            return False
        return self.tracker.in_parts(rows, node.meta["example_value"])

    def reduced(self, node: fx.Node) -> bool:
        """Whether the whole batch's value is the sum or mean of microbatches'."""
        rows = self.rows(node)
        known = rows is not None and rows.kind in (Kind.SUM, Kind.MEAN)
        return known and rows is not None and rows.cause is None and not rows.numbers

    def joint(self) -> dict[fx.Node, None]:
        """The nodes that run on all rows, in order."""
        worth = self._worth()
        joint: dict[fx.Node, None] = {}
        resumed: set[fx.Node] = set()  # of microbatches, after joint ones
        for node in self.nodes:
            reads = [n for n in node.all_input_nodes if n in joint]
            again = not resumed.isdisjoint(node.all_input_nodes)
            meets = node in self.tracker.met or meet(self.rows(node))
            apart = all(map(self.in_parts, reads)) and self._clean(node)
            if meets or (reads and not (apart and (again or node in worth))):
                joint[node] = None
            elif reads or again:
                resumed.add(node)
        return joint

    def _clean(self, node: fx.Node) -> bool:
        return self.in_parts(node) or self.reduced(node)

    def _worth(self) -> Collection[fx.Node]:
        """The nodes from which microbatches have work to share."""
        worth: set[fx.Node] = set()
        for node in reversed(self.nodes):
            if self._clean(node) and (
                self.flops(node) or not worth.isdisjoint(node.users)
            ):
                worth.add(node)
        return worth
