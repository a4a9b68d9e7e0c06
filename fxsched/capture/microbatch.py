"""The model's graph, run once on fake tensors of a microbatch's size and copied.

An interpreter in the sense of fx.Interpreter: it visits each node once, in order. What
computes tensors is copied; sizes become the numbers that they are in a microbatch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from ..ir import joint
from ..ir.early import Early
from ..ir.graphs import (
    REPLICATED,
    Role,
    Spec,
    ancestors,
    name_of,
    storage,
    tensors,
)
from ..ir.meta import note, of_node
from ..ir.regions import is_region
from ..ir.request import Device
from ..ir.written import written
from ..jobs.job import PlanError
from ..partition.autograd_costs import AutogradCosts
from ..partition.costs import Meter, Work, copied
from ..placement.kinds import REPLICATE, Kind, Rows
from ..placement.own_backward import follow_backward
from ..placement.tracker import Tracker, Watch
from .batch import Batch, has_sizes, stand_ins
from .effects import refuse_recomputed, statistics_of, written_by
from .graph_inputs import origin_of
from .refusals import refused


class _Value(NamedTuple):
    """What a node gives, and whether it goes with the size of a microbatch."""

    value: Any
    fits: bool = True


class Microbatch:
    """The graph of one microbatch while it is made.

    gm: the model's graph.
    target: see Request.device.
    graph: the new one.
    new: the new node, or the constant, for each of the model's nodes.
    values: what each of these gives, fake.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        batch: Batch,
        specs: Mapping[int, Spec],
        mode: FakeTensorMode | None = None,
        exact: bool = False,
        target: Device | None = None,
    ) -> None:
        self.gm, self.inputs, self.batch, self.specs = gm, inputs, batch, specs
        self.target = target
        self.mode = mode or FakeTensorMode(allow_non_fake_inputs=True)
        self.joint: set[fx.Node] = set()  # outputs that are of the whole batch
        self.spread: dict[fx.Node, int | None] = {}  # those of which rows are parted
        self.arguments: dict[fx.Node, Any] = {}  # the model's, where they are others
        self.graph = fx.Graph()
        self.new: dict[fx.Node, Any] = {}
        self.values: dict[fx.Node, Any] = {}
        self.tracker = self._tracker(exact)
        self._costs = AutogradCosts(gm, self.mode, target)
        self._interpreter = self._costs.interpreter
        self._first: dict[int, fx.Node] = {}  # the input that a tensor of state is
        self._count: Counter[str] = Counter()  # nodes, by module and operation

    def interpret(self) -> None:
        """Visits all nodes but the output."""
        index = 0
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node, index)
                index += 1
            elif node.op == "get_attr":
                self._attribute(node)
            elif node.op != "output":
                self.call(node)

    def note_input(self, node: fx.Node) -> None:
        """An input, a number or a constant of the call."""

    def totals_text(self) -> str:
        """What is said of values that inputs alone decide, if there are any."""
        return ""

    def early(self) -> Early | None:
        """What computes inputs that follow those of the call; here there are none."""
        return None

    def outputs(self) -> list[Any]:
        """What the model's graph returns."""
        (results,) = self.gm.graph.output_node().args
        assert isinstance(results, (tuple, list))
        return list(results)

    def returned(self) -> set[fx.Node]:
        """What the user gets, and all that it comes of; not what only state does."""
        pairs = zip(self.outputs(), self.gm.meta["returns"], strict=True)
        nodes = [old for old, each in pairs if each.version is None]
        return ancestors(old for old in nodes if isinstance(old, fx.Node))

    def _placeholder(self, node: fx.Node, index: int) -> None:
        value = self.inputs[index]
        if not isinstance(value, Tensor):
            # a size argument: the batch size becomes the microbatch size
            size = self.batch.size(node.meta.get("example_value"), value)
            self.values[node] = self.new[node] = size
            self.note_input(node)
            return
        name, role = origin_of(node).name, self._role(node, value, index)
        if role is not Role.BATCH:
            same = self._first.setdefault(id(value), node)
            if same is not node:
                self.new[node], self.values[node] = self.new[same], self.values[same]
                return
        new = self.graph.placeholder(re.sub(r"\W+|^(?=\d|self$)", "_", name))
        note(new, role=role, name=name, index=index, module="")
        spec = self.specs.get(index) or Spec.of(value)
        if role is Role.BATCH:
            of_node(new)["dim"] = dim = self.batch.dims[index]
            shape = list(spec.shape)
            shape[dim] //= self.batch.microbatches
            spec = spec._replace(shape=tuple(shape))
        with self.mode:
            fake = spec.empty().requires_grad_(value.requires_grad)
        self.put_input(node, new, fake)
        if role in (Role.BATCH, Role.SHARED):
            self.note_input(node)
        if role is Role.BATCH and self.batch.microbatches > 1:
            self.tracker.put(fake, Rows(Kind.SHARD, self.batch.dims[index]))

    def put_input(self, node: fx.Node, new: fx.Node, fake: Tensor) -> None:
        """A new placeholder for a node, and the value that it stands for."""
        self.new[node], self.values[node] = new, fake
        of_node(new)["val"] = fake
        self._costs.resident.add(storage(fake))

    def _role(self, node: fx.Node, value: Tensor, index: int) -> Role:
        origin = origin_of(node)
        if index in self.batch.dims:
            if origin.also and self.batch.microbatches > 1:
                raise PlanError(
                    f"the argument {origin.name} and {origin.also} are the same "
                    "tensor, but a microbatch gets a part of an argument, and all of "
                    f"what the model holds; pass {origin.name}.clone()"
                )
            return Role.BATCH
        if isinstance(value, nn.Parameter):
            return Role.PARAMETER
        return Role.BUFFER if origin.registered else Role.SHARED

    def _attribute(self, node: fx.Node) -> None:
        value = self._interpreter.fetch_attr(str(node.target))
        new = self.graph.get_attr(str(node.target))
        self.new[node], self.values[node] = new, value
        of_node(new)["module"] = ""
        if isinstance(value, Tensor):
            self.values[node] = of_node(new)["val"] = self.mode.from_tensor(value)
            if not value.requires_grad:
                self.note_input(node)

    def call(self, node: fx.Node) -> None:
        """Runs a node, and copies it if it gives tensors or writes into them."""
        args = fx.map_arg(node.args, lambda n: self.values[n])
        kwargs = fx.map_arg(node.kwargs, lambda n: self.values[n])
        self.tracker.enter(node)
        effects, watch = Meter(self.target), Watch(self.tracker)
        with self.mode, self._costs.saved_bytes() as saved, effects, watch:
            value, fits = self._value(node, args, kwargs)
        self.values[node] = value
        if fits:
            self._follow_backward(self.tracker, node, args, kwargs, value)
        if node.target is written:
            self.tracker.note_write(value, list(tensors(args[3])))
        self.tracker.settle(node, value)
        region = is_region(node)
        learned = statistics_of(node)
        into = [*written_by(node), *learned]
        mutated = tuple(tensors([self.values[n] for n in into]))
        if not (region or mutated or list(tensors(value))):
            self.new[node] = value
            return
        recomputed = {k: node.meta[k] for k in ("recompute",) if k in node.meta}
        if not self._costs.resident.isdisjoint(map(storage, mutated)):
            refuse_recomputed(node)
        flops, _, seconds = effects.total
        backward = 0.0
        if not region and fits:
            with refused(node):
                backward = self._costs.backward_seconds(node, args, kwargs, self.values)
        if recomputed and not effects.random:
            backward, saved = backward + seconds, []
        new = self.graph.node_copy(node, lambda n: self.new[n])
        new.meta = {
            "val": value,
            "module": of_node(node)["module"],
            "work": Work(flops, seconds, backward, sum(saved)),
            "mutates": mutated,
            "learns": mutated if learned else (),
            "random": effects.random,
            REPLICATED: effects.random > 0 and self._is_replicated(value),
            "stack_trace": node.meta.get("stack_trace"),
            "key": self._key(node),
            "source": node.name,
            "rows": self.rows(node),
            **recomputed,
        }
        self.new[node] = new

    def _is_replicated(self, value: Any) -> bool:
        """Whether drawn tensors are to be the same in all of several microbatches."""
        shared = (self.tracker.of(t).kind is Kind.REPLICATE for t in tensors(value))
        return self.batch.microbatches > 1 and all(shared)

    def _value(self, node: fx.Node, args: Any, kwargs: Any) -> _Value:
        """Runs a node; where it doesn't go with the size of a microbatch, and the whole
        batch may run it, there are stand-ins."""
        tracker, batch = self.tracker, self.batch
        try:
            value = self._run(node, args, kwargs)
        except PlanError:
            stand_in = self._stand_in(node) if tracker.exact else None
            if stand_in is None:
                raise
            return _Value(stand_in, False)
        example = node.meta.get("example_value")
        if tracker.exact and not has_sizes(value, example, batch):
            stand_in = self._stand_in(node)
            if stand_in is not None:
                return _Value(stand_in, False)
        return _Value(value)

    def _stand_in(self, node: fx.Node) -> Any:
        return stand_ins(node, self.batch, self.tracker, self.values)

    def _follow_backward(
        self, tracker: Tracker, node: fx.Node, args: Any, kwargs: Any, value: Any
    ) -> None:
        """Notes what becomes of rows in a node's backward, if a user wrote it."""
        if node.op == "call_function":
            with self.mode:
                follow_backward(node, args, kwargs, value, tracker)

    def _run(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """What a node gives. Raises PlanError, with its line, for what can't be run."""
        target: Any = node.target
        if is_region(node):
            return target(*args, **kwargs)
        with refused(node):
            return getattr(self._interpreter, node.op)(target, args, kwargs)

    def _tracker(self, exact: bool = False) -> Tracker:
        return Tracker(self.batch.rows, self.batch.symbols, exact, self.batch.joins)

    def rows(self, node: Any) -> Rows | None:
        """How a node's value depends on the batch, if it is a tensor."""
        value = self.values.get(node) if isinstance(node, fx.Node) else None
        return self.tracker.of(value) if isinstance(value, Tensor) else None

    def rows_beside(self, node: fx.Node, whole: Collection[fx.Node]) -> Rows | None:
        """The rows of a node's value, if these that it reads were the same in all
        microbatches; None if it draws or writes, and must not run again."""
        new, value = self.new.get(node), self.values[node]
        if not isinstance(new, fx.Node) or not isinstance(value, Tensor):
            return None
        if of_node(new)["random"] or of_node(new)["mutates"] or node.target is written:
            return None
        tracker = self._tracker()
        for read in node.all_input_nodes:
            operand = self.values[read]
            if read not in whole and isinstance(operand, Tensor):
                tracker.put(operand, self.tracker.of(operand))
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        tracker.enter(node)
        try:
            with self.mode, Watch(tracker):
                again = self._run(node, args, kwargs)
        except PlanError:  # it doesn't go with the size of a microbatch
            return None
        self._follow_backward(tracker, node, args, kwargs, again)
        tracker.settle(node, again)
        return tracker.of(again)

    def rows_left(self, rows: Rows | None, output: Any) -> Rows | None:
        """The rows of an output, with what microbatches do by themselves on the way."""
        if rows is None or output in self.joint:
            rows = None if rows is None else REPLICATE
        kept = self.tracker.kept
        if rows is None or rows.cause or kept is None:
            return rows
        return rows._replace(cause=kept)

    def _key(self, node: fx.Node) -> str:
        """A name that a node keeps in other traces of the model."""
        place = f"{of_node(node)['module']}:{name_of(node.target)}"
        self._count[place] += 1
        return f"{place}:{self._count[place]}"

    def append(
        self, target: Callable[..., Any], *args: fx.Node, like: fx.Node | None = None
    ) -> fx.Node:
        """Another operation on values of the model's graph, at the place of `like`."""
        node = fx.Graph().call_function(target, args)
        place = (like or args[0]).meta
        node.meta = {k: place[k] for k in ("stack_trace", "module") if k in place}
        self.call(node)
        node.args = ()  # the model's graph knows nothing of it
        return node


class WholeBatch(Microbatch):
    """The graph of the whole batch, beside that of a microbatch, whose state it has."""

    def __init__(self, part: Microbatch) -> None:
        batch = part.batch
        whole = Batch(
            1, batch.rows * batch.microbatches, batch.dims, batch.full, batch.full
        )
        call, target = (part.inputs, whole, part.specs), part.target
        super().__init__(part.gm, *call, part.mode, target=target)
        self.part = part

    def put_input(self, node: fx.Node, new: fx.Node, fake: Tensor) -> None:
        """State is the same tensor in both, so that writes into it are seen."""
        if of_node(new)["role"] is not Role.BATCH:
            fake = self.part.values[node]
        super().put_input(node, new, fake)

    def _attribute(self, node: fx.Node) -> None:
        super()._attribute(node)
        self.values[node] = self.part.values[node]


def add(
    trace: Microbatch,
    after: fx.Node,
    target: Any,
    *args: Any,
    like: fx.Node,
    value: Any,
) -> fx.Node:
    """A node of the microbatch's graph that the model has not, at the place of one that
    it has; its value is fake."""
    if after.op == "placeholder":
        after = trace.graph.find_nodes(op="placeholder")[-1]
    with trace.graph.inserting_after(after):
        new = trace.graph.call_function(target, args)
    note(
        new,
        val=value,
        work=copied(value, trace.target),
        module=of_node(like).get("module", ""),
        mutates=(),
        learns=(),
        random=0,
        stack_trace=like.meta.get("stack_trace"),
        key=f"{target.__name__}:{new.name}",
        rows=None,
        joint=True,
    )
    return new


def rows_of(trace: Microbatch, whole: fx.Node, dim: int, like: fx.Node) -> fx.Node:
    """A microbatch's rows, along a dimension, of a value of the whole batch."""
    count = trace.batch.microbatches
    with trace.mode:
        value = of_node(whole)["val"].chunk(count, dim)[0].clone()
    trace.tracker.put(value, Rows(Kind.SHARD, dim))
    return add(trace, whole, joint.part, whole, dim, count, like=like, value=value)
