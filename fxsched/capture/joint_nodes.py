"""Puts operations in which rows of the batch meet into the graph of a microbatch, as
operations on the whole batch.

before: z = norm(x); logits = z @ z.T; loss = cross_entropy(logits, y)
after:  z = norm(x); whole_z = join(z, "rows", 0, 4); whole_y = join(y, "rows", 0, 4)
        logits = whole_z @ whole_z.T; loss = cross_entropy(logits, whole_y)

What has no rows, microbatches read as it is:

before: mean = x.mean(0); y = x - mean
after:  mean = x.mean(0); whole = join(mean, "mean", 0, 4); y = x - whole
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx

from ..ir import joint
from ..ir.graphs import REPLICATED, Role, ancestors, storage
from ..ir.meta import of_node
from ..ir.user_line import line_of
from ..jobs.job import PlanError
from ..placement.kinds import Kind, Rows
from ..placement.own_backward import own_name
from .batch_norms import ONCE
from .domains import Domains
from .microbatch import Microbatch, WholeBatch, add, rows_of
from .row_versions import RowVersions


class Joined(NamedTuple):
    """What became of rows that meet: whether some do, and whether microbatches compute
    their own rows of what they meet in."""

    meets: bool
    spread: bool


NOTHING_JOINED = Joined(False, False)


def join_rows(
    trace: Microbatch, outputs: Sequence[Any], parted: Collection[Any], spread: bool
) -> Joined:
    """Replaces what microbatches cannot compute by operations on the whole batch.

    outputs: of the model's graph, those that shall be the whole batch's. parted: those
        whose values of microbatches the user says how to put together.
    spread: whether microbatches compute rows of them where they can; see
        row_versions.py.
    """
    wanted = [old for old in outputs if isinstance(old, fx.Node) and old not in parted]
    rows = [trace.rows(old) for old in wanted]
    numbers = any(each is not None and each.numbers for each in rows)
    once = any(ONCE in node.meta for node in trace.gm.graph.nodes)
    if trace.tracker.causes or numbers or once:
        joining = _Joining(trace, spread)
        needed = not ancestors(wanted).isdisjoint(joining.of_all)
        if numbers or once or needed:
            joining.run(wanted)
            return Joined(True, joining.spread)
    return NOTHING_JOINED


class _Joining:
    """before and after: see the file."""

    def __init__(self, trace: Microbatch, spread: bool) -> None:
        self.wants_spread, self.spread = spread, False
        self.trace, self.microbatches = trace, trace.batch.microbatches
        self.domains = Domains(trace)
        self.joint = self.domains.joint
        self.of_all = [*self.joint, *self.domains.whole]  # need the whole batch
        self.new: dict[fx.Node, Any] = {}  # of the whole batch
        self.parts: dict[fx.Node, fx.Node] = {}  # of a microbatch, of joint values

    def run(self, outputs: Sequence[fx.Node]) -> None:
        """Adds the nodes that the outputs need."""
        trace = self.trace
        self.whole = WholeBatch(trace)
        self.whole.interpret()
        self.versions = RowVersions(trace, self.whole, self.domains, self._of_whole)
        for node in self.domains.nodes:
            if node not in self.joint:
                self._read_parts(node)
            elif not self.wants_spread or ONCE in node.meta:
                self._of_whole(node)
        final = self._finals(outputs)
        self.versions.drop_unused(final.values())
        for node in reversed(self.joint):
            self._drop(node)
        for node, version in final.items():
            trace.new[node], trace.values[node] = version, of_node(version)["val"]

    def _finals(self, outputs: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
        """What becomes of the outputs that are of the whole batch."""
        final, trace = {}, self.trace
        for node in outputs:
            rows = trace.rows(node)
            if node not in self.joint and not (rows is not None and rows.numbers):
                continue
            dims: Sequence[int | None] = self.versions.dims(node) or [None]
            for dim in dims:
                version = self._version(node, dim)
                if version is not None:
                    trace.spread[node] = dim
                    break
            else:
                trace.joint.add(node)
                version = self._of_whole(node)
            final[node] = version
        return final

    def _version(self, node: fx.Node, dim: int | None) -> fx.Node | None:
        """What a microbatch computes of a joint value, if it may and can."""
        if not self.wants_spread or node not in self.joint:
            return None
        if node in self.domains.around:
            return None
        version = self.versions.of(node, dim)
        self.spread |= version is not None
        return version

    def _drop(self, node: fx.Node) -> None:
        """A microbatch does nothing of its own in a joint node."""
        new = self.trace.new[node]
        if isinstance(new, fx.Node) and not new.users and new.op != "placeholder":
            self.trace.graph.erase_node(new)

    def _read_parts(self, node: fx.Node) -> None:
        """A node of microbatches takes its rows of what global-batch ones make, or
        all."""
        new = self.trace.new[node]
        whole = self.domains.whole.get(node, ())
        for read in node.all_input_nodes:
            if read in whole and isinstance(new, fx.Node):
                new.replace_input_with(self.trace.new[read], self._of_whole(read))
            elif read in self.joint and isinstance(new, fx.Node):
                old = self.trace.new[read]
                if isinstance(old, fx.Node) and self.domains.in_parts(read):
                    new.replace_input_with(old, self._part(read))

    def _part(self, node: fx.Node) -> fx.Node:
        """A microbatch's rows of a joint value."""
        if node not in self.parts:
            rows = self.trace.rows(node)
            assert rows is not None, "a tensor"
            version = self._version(node, rows.dim)
            if version is None:
                version = rows_of(self.trace, self._of_whole(node), rows.dim, node)
            self.parts[node] = version
        return self.parts[node]

    def _of_whole(self, node: fx.Node) -> Any:
        """The value of a node on the whole batch."""
        if node not in self.new:
            self.new[node] = self._made(node)
        return self.new[node]

    def _made(self, node: fx.Node) -> Any:
        new, own = self.trace.new[node], self.whole.new[node]
        if not isinstance(new, fx.Node) or not isinstance(own, fx.Node):
            return own
        if new.op == "get_attr":
            return new
        if new.op == "placeholder" and of_node(new)["role"] is not Role.BATCH:
            return new
        version = None if self.versions.dims(node) else self._version(node, None)
        if version is not None:
            return self._join(version, self.versions.rows(version), node)
        known = self.domains.in_parts(node) or self.domains.reduced(node)
        if known and node not in self.joint and not self._is_view(node):
            return self._join(new, self.trace.rows(node), node)
        return self._copy(node, new, own)

    def _is_view(self, node: fx.Node) -> bool:
        """Whether a value is a view of one that the whole batch has too."""
        if node.op == "placeholder" or not node.all_input_nodes:
            return False
        if own_name(node) is not None:  # its B runs once
            return False
        first = node.all_input_nodes[0]
        source, value = self.trace.values.get(first), self.trace.values[node]
        if not (isinstance(source, Tensor) and isinstance(value, Tensor)):
            return False
        return storage(source) == storage(value) and self.domains.in_parts(first)

    def _join(self, part: fx.Node, rows: Rows | None, node: fx.Node) -> fx.Node:
        """What microbatches make, for the whole batch."""
        assert rows is not None, "a tensor"
        how = {Kind.SUM: "sum", Kind.MEAN: "mean"}.get(rows.kind, "rows")
        args = part, how, rows.dim if how == "rows" else 0, self.microbatches
        value = self.whole.values[node]
        return add(self.trace, part, joint.join, *args, like=node, value=value)

    def _copy(self, node: fx.Node, new: fx.Node, own: fx.Node) -> fx.Node:
        """An operation of the whole batch, at its place in the program."""
        self._refuse_effects(node, new, own)
        given = self.trace.arguments.get(node, node.args)
        args, kwargs = fx.map_arg((given, node.kwargs), self._of_whole)
        with self.trace.graph.inserting_after(new):
            copy = self.trace.graph.create_node(node.op, node.target, args, kwargs)
        drawn = {REPLICATED: of_node(own)["random"] > 0}
        copy.meta = {**own.meta, **drawn, "joint": True}
        return copy

    def _refuse_effects(self, node: fx.Node, new: fx.Node, own: fx.Node) -> None:
        """Raises PlanError for what must not run for the whole batch besides."""
        if ONCE in node.meta:
            return
        where = line_of(node.meta.get("stack_trace"))
        drawn = of_node(own)["random"] and not new.meta[REPLICATED]
        if node not in self.joint and (drawn or of_node(own)["mutates"]):
            does = (
                "writes in place" if of_node(own)["mutates"] else "draws random numbers"
            )
            raise PlanError(
                f"an operation {does} in each microbatch, and rows of the whole batch "
                f"meet in a later one that reads its result{where}\n  apply it to "
                "the result of the later operation instead or, if rows don't meet "
                "(tokens sorted by expert and back), write "
                'fxsched.backend(schedule, loss_reduction="mean")'
            )
