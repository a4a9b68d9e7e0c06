"""Which operations of a traced graph run on the rows of the whole batch at once.

From the first one that rows of different microbatches meet in, a value is of the whole
batch, until microbatches can go on with their own rows of it. They do where there is
work to share: a matrix product or such. What has no rows, such as a mean over them, all
microbatches read as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import networkx as nx
from torch import fx

from ..ir.meta import of_node
from ..ir.regions import is_region
from ..partition.costs import Work
from ..placement.kinds import Kind, Rows, meet
from .microbatch import Microbatch


class Domains:
    """Finds the joint nodes of a graph, whose microbatch was traced.

    nodes: of the model's graph, those that compute. joint: those that run on all rows,
        in order; around: of these, BatchNorms, with what lies around them.
    whole: for nodes of microbatches, what they read as it is for the whole batch.
    """

    def __init__(self, trace: Microbatch) -> None:
        self.trace, self.tracker, self.rows = trace, trace.tracker, trace.rows
        nodes = (n for n in trace.gm.graph.nodes if n.op.startswith("call"))
        self.nodes = [node for node in nodes if not is_region(node)]
        self.around = _around_norms(self.nodes, self.tracker.met, self._seconds)
        self.whole: dict[fx.Node, list[fx.Node]] = {}
        self.own = self._own()
        self.joint = self._joint()

    def _work(self, node: fx.Node) -> Work:
        new, nothing = self.trace.new.get(node), Work(0, 0.0, 0.0, 0)
        known = (
            of_node(new).get("work", nothing) if isinstance(new, fx.Node) else nothing
        )
        assert isinstance(known, Work)
        return known

    def _seconds(self, node: fx.Node) -> float:
        return self._work(node).forward + self._work(node).backward

    def in_parts(self, node: fx.Node, rows: Rows | None = None) -> bool:
        """Whether microbatches have this value's rows, one after another."""
        rows = rows or self.rows(node)
        if rows is None or not rows.plain:
            return False
        return self.tracker.in_parts(rows, node.meta["example_value"])

    def reduced(self, node: fx.Node) -> bool:
        """Whether the whole batch's value is the sum or mean of microbatches'."""
        rows = self.rows(node)
        return rows is not None and rows.plain and rows.kind in (Kind.SUM, Kind.MEAN)

    def _joint(self) -> dict[fx.Node, None]:
        worth, ends = self._useful()
        joint: dict[fx.Node, None] = {}
        resumed: set[fx.Node] = set()  # of microbatches, after global-batch ones
        for node in self.nodes:
            reads = [n for n in node.all_input_nodes if n in joint]
            again = not resumed.isdisjoint(node.all_input_nodes)
            meets = node in self.tracker.met or meet(self.rows(node))
            apart = all(map(self.in_parts, reads)) and self._clean(node)
            if "once" in node.meta or node in self.around:
                joint[node] = None
            elif meets or (reads and not (apart and (again or node in worth))):
                useful = node in worth or node in ends
                if useful and self._reads_whole(node, joint):
                    resumed.add(node)
                else:
                    joint[node] = None
            elif reads or again:
                resumed.add(node)
        return joint

    def _reads_whole(self, node: fx.Node, joint: Collection[fx.Node]) -> bool:
        """Whether microbatches can have their rows of this value by reading what has
        none as it is for the whole batch."""
        whole = [
            n
            for n in node.all_input_nodes
            if self.reduced(n) or (n in joint and not self.in_parts(n))
        ]
        if not whole or node not in self.own:
            return False
        sizes = (self.tracker.dims(n.meta["example_value"]) for n in whole)
        if self.own[node] - set(whole) or any(sizes):
            return False
        self.whole[node] = whole
        return True

    def _own(self) -> dict[fx.Node, set[fx.Node]]:
        """What rows meet in, but would not if what has none were of the whole batch."""
        own = {}
        for node in self.nodes:
            if node in self.tracker.met:
                others = {n for n in node.all_input_nodes if self._is_other(n)}
                rows = self.trace.rows_beside(node, others) if others else None
                if rows and self.in_parts(node, rows):
                    own[node] = others
        return own

    def _is_other(self, node: fx.Node) -> bool:
        """Whether a value depends on the batch, and microbatches have no rows of it."""
        rows = self.rows(node)
        shared = rows is None or rows.kind is Kind.REPLICATE
        return not shared and not self.in_parts(node)

    def _clean(self, node: fx.Node) -> bool:
        return self.in_parts(node) or self.reduced(node)

    def _useful(self) -> tuple[set[fx.Node], set[fx.Node]]:
        """The nodes from which microbatches have work to share, and those after which
        rows meet no more."""
        worth, ends = set[fx.Node](), set[fx.Node]()
        for node in reversed(self.nodes):
            stays_apart = node in self.own or node not in self.tracker.met
            work = self._work(node).flops or not worth.isdisjoint(node.users)
            if work and stays_apart and self._clean(node):
                worth.add(node)
            users = (user for user in node.users if user.op != "output")
            apart = stays_apart and self.in_parts(node)
            if self.reduced(node) or (apart and ends.issuperset(users)):
                ends.add(node)
        return worth, ends


def _around_norms(
    nodes: Sequence[fx.Node],
    met: Collection[fx.Node],
    seconds: Callable[[fx.Node], float],
) -> set[fx.Node]:
    """The BatchNorms that run on all rows, and these nodes around them: those between
    two, which would wait for each other 20 times in a network of 20, and those before
    the first and after the last where they are less work.

    before: a = conv(x); b = norm(a); c = conv(b); d = norm(c); loss = f(d)
    after:  all of that but a long f in one stage of the global batch

    nodes: that compute, in order. met: where rows meet in other ways. seconds: of each.
    """
    norms = [n for n in nodes if "norm" in n.meta]
    if not norms:
        return set()
    flow: nx.DiGraph[fx.Node] = nx.DiGraph()
    flow.add_nodes_from(nodes)
    flow.add_edges_from((p, n) for n in nodes for p in n.all_input_nodes if p in flow)
    core = _reached(flow, norms) & _reached(flow.reverse(copy=False), norms)
    apart = flow.subgraph(n for n in nodes if n not in met or n in core)
    around = set(core)
    for part in nx.weakly_connected_components(flow.subgraph(core)):
        work = sum(map(seconds, part))
        for way in (apart.reverse(copy=False), apart):
            more = _reached(way, part) - core
            if sum(map(seconds, more)) <= work:
                around |= more
    return around


def _reached(flow: nx.DiGraph[fx.Node], starts: Iterable[fx.Node]) -> set[fx.Node]:
    """The starts, and all that is reached from them."""
    return {node for layer in nx.bfs_layers(flow, [*starts]) for node in layer}
