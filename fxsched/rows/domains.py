"""Which operations of a traced graph run on the rows of the whole batch at once.

From the first one that rows of different microbatches meet in, a value is of the whole
batch, until microbatches can go on with their own rows of it. They do where there is
work to share: a matrix product or such. What has no rows, such as a mean over them, all
microbatches read as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from torch import Tensor, fx

from ..ir.graphs import storage, tensors
from .kinds import Kind, Rows, meet
from .tracker import Tracker


class Domains:
    """Finds the joint nodes of a graph whose rows were tracked.

    nodes: of Dynamo's graph, those that compute.
    value: the microbatch's value of each. flops: of each.
    beside: the rows of a node's value, if these that it reads are of the whole batch;
        None if it must not run again.
    writes: the tensors that a node writes into.
    around: the BatchNorms that run on all rows, with what lies around them.
    whole: for nodes of microbatches, what they read as it is for the whole batch.
    """

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        tracker: Tracker,
        value: Callable[[fx.Node], object],
        flops: Callable[[fx.Node], float],
        beside: Callable[[fx.Node, Collection[fx.Node]], Rows | None],
        writes: Callable[[fx.Node], Iterable[Tensor]],
        around: Collection[fx.Node],
    ) -> None:
        self.nodes, self.tracker, self.value, self.flops = nodes, tracker, value, flops
        self.beside, self.writes = beside, writes
        self.whole: dict[fx.Node, list[fx.Node]] = {}
        self.own: dict[fx.Node, set[fx.Node]] = {}
        self.around = around

    def rows(self, node: fx.Node) -> Rows | None:
        """The rows of a tensor."""
        value = self.value(node)
        return self.tracker.of(value) if isinstance(value, Tensor) else None

    def in_parts(self, node: fx.Node) -> bool:
        """Whether microbatches have this value's rows, one after another."""
        rows = self.rows(node)
        return rows is not None and self._rows_in_parts(node, rows)

    def _rows_in_parts(self, node: fx.Node, rows: Rows) -> bool:
        if rows.cause is not None or rows.numbers:
            return False
        return self.tracker.in_parts(rows, node.meta["example_value"])

    def reduced(self, node: fx.Node) -> bool:
        """Whether the whole batch's value is the sum or mean of microbatches'."""
        rows = self.rows(node)
        known = rows is not None and rows.kind in (Kind.SUM, Kind.MEAN)
        return known and rows is not None and rows.cause is None and not rows.numbers

    def joint(self) -> dict[fx.Node, None]:
        """The nodes that run on all rows, in order: where one writes into a value, all
        that make it."""
        self.own = self._own()
        places = {
            node: set(map(storage, tensors(self.value(node))))
            | set(map(storage, self.writes(node)))
            for node in self.nodes
        }
        written: set[fx.Node] = set()
        while True:
            joint = self._joint(written)
            into = {storage(t) for node in joint for t in self.writes(node)}
            into |= self._missed(joint, places)
            new = {n for n in self.nodes if n not in joint and places[n] & into}
            new |= self._torn(joint, places)
            if not new:
                return joint
            written |= new

    def _missed(
        self,
        joint: Collection[fx.Node],
        places: Mapping[fx.Node, Collection[int]],
    ) -> set[int]:
        """The storages of joint values that microbatches write into, each into its own
        rows, and that are read later by other nodes than know of these rows."""
        missed = set[int]()
        for i, node in enumerate(self.nodes):
            written = set(map(storage, self.writes(node))) if node not in joint else ()
            for where in written:
                reads = [n for n in node.all_input_nodes if n in joint]
                own = [n for n in reads if where in places[n]]
                for later in self.nodes[i + 1 :] if own else ():
                    others = {n for n in later.all_input_nodes if n in joint}
                    others -= set() if later in joint else set(own)
                    if any(where in places[n] for n in others):
                        missed.add(where)
        return missed

    def _torn(
        self,
        joint: Collection[fx.Node],
        places: Mapping[fx.Node, Collection[int]],
    ) -> set[fx.Node]:
        """What lies between values of microbatches and a write into them of what met of
        their rows: no stage could have the memory and all that reads it."""
        torn = set[fx.Node]()
        met = {*joint, *(n for reads in self.whole.values() for n in reads)}
        for node in self.nodes:
            written = set(map(storage, self.writes(node)))
            if node in joint or not written:
                continue
            before = _ancestors(node) | {node}
            own = {n for n in before if written & set(places.get(n, ()))} - set(joint)
            if any((_ancestors(n) | {n}) & own for n in met & before):
                torn |= {n for n in before if (_ancestors(n) | {n}) & own}
        return torn - set(joint)

    def _joint(self, written: Collection[fx.Node]) -> dict[fx.Node, None]:
        worth, ends = self._worth(), self._ends()
        joint: dict[fx.Node, None] = {}
        resumed: set[fx.Node] = set()  # of microbatches, after joint ones
        self.whole = {}
        for node in self.nodes:
            known = [n for n in node.all_input_nodes if self._is_known(n, joint)]
            reads = [n for n in node.all_input_nodes if n in joint and n not in known]
            again = not resumed.isdisjoint(node.all_input_nodes)
            meets = node in self.tracker.met or meet(self.rows(node))
            meets = meets or node in written
            apart = all(map(self.in_parts, reads)) and self._clean(node)
            if "once" in node.meta or node in self.around:
                joint[node] = None
            elif meets or (reads and not (apart and (again or node in worth))):
                useful = (node in worth or node in ends) and node not in written
                if useful and self._reads_whole(node, joint):
                    resumed.add(node)
                else:
                    joint[node] = None
            elif reads or again or known:
                resumed.add(node)
            if known and node not in joint:
                self.whole[node] = [*self.whole.get(node, ()), *known]
        return joint

    def _is_known(self, node: fx.Node, joint: Collection[fx.Node]) -> bool:
        """Whether a value is made once and then the same for all microbatches."""
        rows = self.rows(node)
        shared = rows is not None and rows.kind is Kind.SHARED
        return shared and node in joint and "once" in node.meta

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
        if self.own[node] - set(whole) or any(map(self._has_rows, whole)):
            return False
        self.whole[node] = whole
        return True

    def _own(self) -> dict[fx.Node, set[fx.Node]]:
        """What rows meet in, but would not if what has none were of the whole batch."""
        own = {}
        for node in self.nodes:
            if node in self.tracker.met:
                others = {n for n in node.all_input_nodes if self._is_other(n)}
                rows = self.beside(node, others) if others else None
                if rows and self._rows_in_parts(node, rows):
                    own[node] = others
        return own

    def _is_other(self, node: fx.Node) -> bool:
        """Whether a value depends on the batch, and microbatches have no rows of it."""
        rows = self.rows(node)
        shared = rows is None or rows.kind is Kind.SHARED
        return not shared and not self.in_parts(node)

    def _has_rows(self, node: fx.Node) -> bool:
        """Whether a size of a value depends on the batch."""
        return any(map(self.tracker.depends, node.meta["example_value"].shape))

    def _clean(self, node: fx.Node) -> bool:
        return self.in_parts(node) or self.reduced(node)

    def _worth(self) -> Collection[fx.Node]:
        """The nodes from which microbatches have work to share."""
        worth: set[fx.Node] = set()
        for node in reversed(self.nodes):
            work = self.flops(node) or not worth.isdisjoint(node.users)
            if work and self._clean(node) and self._stays_apart(node):
                worth.add(node)
        return worth

    def _stays_apart(self, node: fx.Node) -> bool:
        return node in self.own or node not in self.tracker.met

    def _ends(self) -> Collection[fx.Node]:
        """The nodes after which rows meet no more."""
        ends: set[fx.Node] = set()
        for node in reversed(self.nodes):
            users = (user for user in node.users if user.op != "output")
            apart = self.in_parts(node) and self._stays_apart(node)
            if self.reduced(node) or (apart and all(user in ends for user in users)):
                ends.add(node)
        return ends


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """All that a node comes of."""
    found, queue = set[fx.Node](), [node]
    while queue:
        new = set(queue.pop().all_input_nodes) - found
        found |= new
        queue += new
    return found
