"""What a trace knows of each output, and so what microbatches' values of it become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from ..ir.graphs import REPLICATED, Output, Role, ancestors, storage, written_storages
from ..ir.user_line import line_of, user_line
from ..jobs.job import PlanError
from ..rows.kinds import REPLICATE
from .graph_inputs import plain
from .microbatch import Microbatch
from .outputs import TracedOutput, decide, describe
from .picked_rows import FILLED
from .returns import Returned
from .state_updates import StateUpdates, mark_written


def finish_outputs(
    trace: Microbatch,
    declared: Mapping[int | str, str] | None,
    training: bool,
    once: bool,
) -> list[Output]:
    """Puts the outputs into the graph of a microbatch; what the user gets of them.

    declared: what their values become, as the user says; None, where it doesn't matter.
    training: whether gradients are wanted.
    once: whether state gets a new version once a call, not in each microbatch.
    """
    results = trace.outputs()
    new = [trace.new[old] if isinstance(old, fx.Node) else old for old in results]
    mark_written(trace)
    updates = StateUpdates(trace, training, once)
    states = [updates.output(position, old) for position, old in enumerate(results)]
    reader = _OutputReader(trace, declared or {})
    outputs = [
        state or updates.placed(position, old, reader.output(position, old))
        for position, (state, old) in enumerate(zip(states, results, strict=True))
    ]
    trace.graph.output(tuple(map(_returned, outputs, new)))
    if declared is None or trace.batch.microbatches == 1:
        return outputs
    return decide(outputs, reader.open)


def _returned(output: Output, new: Any) -> Any:
    """What the graph of a microbatch returns for an output."""
    if output.kind == "constant":
        return None if isinstance(output.constant, Tensor) else output.constant
    return None if output.kind in ("state", "given") else new


def declared_outputs(trace: Microbatch, declared: Mapping[int | str, str]) -> set[Any]:
    """The outputs whose microbatches' values the user says how to put together."""
    returns: Sequence[Returned] = trace.gm.meta["returns"]
    pairs = enumerate(zip(trace.outputs(), returns, strict=True))
    return {old for i, (old, each) in pairs if _name(i, each) in declared}


def _name(position: int, returned: Returned) -> int | str:
    """What the user calls an output."""
    if returned.label is not None:
        return returned.label
    return plain(returned.stored[0]) if returned.stored else position


class _OutputReader:
    """Describes the outputs that are no state.

    open: what is known of those whose microbatches have values of their own.
    """

    def __init__(self, trace: Microbatch, declared: Mapping[int | str, str]) -> None:
        self.trace, self.declared = trace, declared
        self.open: dict[int, TracedOutput] = {}
        self._written = written_storages(trace.graph)

    def output(self, position: int, old: Any) -> Output:
        """How the microbatches' values of one output become what the user gets."""
        trace = self.trace
        returned: Returned = trace.gm.meta["returns"][position]
        name = _name(position, returned)
        new = trace.new[old] if isinstance(old, fx.Node) else old
        if not isinstance(new, fx.Node):
            size = self._whole_size(name, old, new)
            return Output("constant", constant=size, name=name)
        if new.op == "get_attr":
            tensor = getattr(trace.gm, str(new.target))
            return Output("constant", constant=tensor, name=name)
        if new.op == "placeholder" and new.meta["role"] is Role.SHARED:
            return Output("given", state=new.meta["index"], name=name)
        fake = trace.values[old]
        if trace.batch.microbatches == 1:
            scalar = fake.dim() == 0 and fake.is_floating_point()
            kind, gradient = "scalar" if scalar else "whole", fake.requires_grad
            return Output(kind, differentiable=gradient, name=name)
        traced = self.open[position] = TracedOutput(
            name,
            returned.label is not None,
            fake,
            old.meta["example_value"].shape,
            self._origins_of(old, returned),
            trace.rows(old),
            str(user_line(old.meta.get("stack_trace"))),
        )
        if old in trace.joint:
            gradient = fake.requires_grad
            return Output("whole", differentiable=gradient, name=name, joint=True)
        if FILLED in old.meta:
            raise PlanError(
                f"output {name!r} has as many rows as values say"
                f"{line_of(old.meta.get('stack_trace'))}\n  those of microbatches "
                "can't be put together; return a tensor with one row for each sample"
            )
        dim = trace.spread.get(old)
        if dim is not None:
            return Output("rows", dim, differentiable=fake.requires_grad, name=name)
        return describe(traced, trace.batch, self.declared.get(name))

    def _whole_size(self, name: int | str, old: Any, new: Any) -> Any:
        """A size that is returned, for the whole batch."""
        value = getattr(old, "meta", {}).get("example_value")
        if not self.trace.batch.changes(value):
            return new
        size = self.trace.batch.whole(value)
        if size is None:
            raise PlanError(
                f"output {name!r} is a size that depends on the batch; return tensors, "
                "and take sizes from them afterwards"
            )
        return size

    def _origins_of(self, old: fx.Node, returned: Returned) -> frozenset[str]:
        """What a microbatch's value comes of. Totals that it is given are the whole
        batch's."""
        if old in self.trace.joint:
            return frozenset()
        sources = frozenset(filter(None, map(self._source, ancestors([old]))))
        same = returned.version is not None and self.trace.rows(old) == REPLICATE
        return sources - {"batch"} if same else sources

    def _source(self, node: fx.Node) -> str | None:
        """What a value comes of that no other value gave it."""
        new = self.trace.new[node]
        if node.op != "placeholder":
            meta = new.meta if isinstance(new, fx.Node) else {}
            own = meta.get("random") and not meta[REPLICATED]
            return "random" if own else None
        if not isinstance(new, fx.Node):
            size = node.meta.get("example_value")
            return "batch" if self.trace.batch.changes(size) else None
        if new.meta["role"] is Role.BATCH:
            return "batch"
        return "state" if storage(new.meta["val"]) in self._written else None


def output_leaves(trace: Microbatch) -> dict[fx.Node, frozenset[int]]:
    """For each output, the inputs of the call that its gradient reaches, by autograd's
    records of the trace."""
    inputs = trace.graph.find_nodes(op="placeholder")
    index = {id(node.meta["val"]): node.meta["index"] for node in inputs}
    return {
        old: frozenset(
            index[each] for each in _leaves(trace.values[old]) & index.keys()
        )
        for old in trace.outputs()
        if isinstance(old, fx.Node) and isinstance(trace.values.get(old), Tensor)
    }


def _leaves(value: Tensor) -> set[int]:
    """The tensors without a history that a value comes of, by their ids."""
    if value.grad_fn is None:
        return {id(value)} if value.requires_grad else set()
    leaves, seen, queue = set[int](), {value.grad_fn}, [value.grad_fn]
    while queue:
        function: Any = queue.pop()
        if hasattr(function, "variable"):
            leaves.add(id(function.variable))
        new = {each for each, _ in function.next_functions if each} - seen
        seen |= new
        queue += new
    return leaves
