"""Outputs that are state after the step: what the model keeps from call to call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..ir.graphs import Output, Role, Spec, storage, written_storages
from ..ir.user_line import line_of, user_line
from ..jobs.job import PlanError
from ..rows.kinds import Kind
from .effects import written_by
from .graph_inputs import origin_of, placeholders
from .microbatch import Microbatch
from .returns import Returned

aten = torch.ops.aten


def mark_written(trace: Microbatch) -> None:
    """Other tensors of the model that it writes into are kept like buffers."""
    written = written_storages(trace.graph)
    for node in placeholders(trace.gm):
        new = trace.new[node]
        if isinstance(new, fx.Node) and new.meta["role"] is Role.SHARED:
            changed = storage(new.meta["val"]) in written
            if changed and not origin_of(node).argument:
                new.meta["role"] = Role.BUFFER


def kept_rows(trace: Microbatch) -> fx.Node | None:
    """The first node of what comes of the batch and goes into the model's state, but
    for statistics of a normalization."""
    returns: Sequence[Returned] = trace.gm.meta["returns"]
    pairs = zip(trace.outputs(), returns, strict=True)
    kept = [old for old, r in pairs if r.replaces or r.version is not None]
    kept += [
        node
        for node in trace.gm.graph.nodes
        if any(n.op == "placeholder" for n in written_by(node))
    ]
    for node in sorted(n for n in kept if isinstance(n, fx.Node)):
        rows = None if "once" in node.meta else trace.rows(node)
        if rows is not None and rows.kind is not Kind.SHARED:
            return node
    return None


def refuse_running(trace: Microbatch) -> None:
    """Raises PlanError for state of the batch, unless loss_reduction="exact"."""
    kept = kept_rows(trace)
    if kept is not None:
        raise PlanError(
            "loss_reduction= of microbatches: the model writes what it computes of the "
            "batch into its own state, which would go from microbatch to microbatch"
            f"{line_of(kept.meta.get('stack_trace'))}\n"
            "  leave loss_reduction out: state then has eager's value, of all rows"
        )


class StateUpdates:
    """Finds outputs that are state, and writes new values of attributes into it.

    training: whether gradients are wanted.
    once: whether new values are outputs of the step, of the whole batch; else each
        microbatch sees what the one before it left.
    """

    def __init__(self, trace: Microbatch, training: bool, once: bool) -> None:
        self.trace, self.training, self.once = trace, training, once
        self.written = written_storages(trace.graph)
        self.states = {  # what is no part of the batch, by position
            i: state
            for i, node in enumerate(placeholders(trace.gm))
            if isinstance(state := trace.new[node], fx.Node)
            and state.meta["role"] is not Role.BATCH
        }

    def output(self, position: int, old: Any) -> Output | None:
        """The output that is state after the step: a buffer that the model writes
        into and returns, or a new tensor in the place of an old one."""
        replaced = self._replaced(position, old)
        if self._is_tensor(old) and storage(self.trace.values[old]) in self.written:
            for state in self.states.values():
                if _is_same(state.meta["val"], self.trace.values[old]):
                    return Output("state", state=state.meta["index"])
        if self.trace.batch.microbatches == 1:
            return None
        for state in replaced:
            self._check(state, old)
            state.meta["role"] = Role.BUFFER
            if not self.once:
                self._replace(state, old)
        if self.once or not replaced:
            return None
        return Output("state", state=replaced[0].meta["index"], replaced=True)

    def placed(self, position: int, old: Any, output: Output) -> Output:
        """An output that is a new version of state, or not, with where it goes."""
        returned: Returned = self.trace.gm.meta["returns"][position]
        replaced = self._replaced(position, old)
        if returned.version is not None and self._is_tensor(old):
            state = self.states[returned.version]
            self._check(state, old)
        elif replaced and self.once:
            state = replaced[0]
        else:
            return output
        return output._replace(
            differentiable=False,
            state=state.meta["index"],
            replaced=returned.version is None,
            kept=returned.kept,
        )

    def _is_tensor(self, old: Any) -> bool:
        """Whether an output is a tensor that the graph computes."""
        new = self.trace.new[old] if isinstance(old, fx.Node) else old
        return isinstance(new, fx.Node) and isinstance(self.trace.values[old], Tensor)

    def _replaced(self, position: int, old: Any) -> list[fx.Node]:
        """What an output takes the place of."""
        returned: Returned = self.trace.gm.meta["returns"][position]
        places = returned.replaces if self._is_tensor(old) else ()
        return [self.states[i] for i in places if i in self.states]

    def _check(self, state: fx.Node, old: fx.Node) -> None:
        """Raises PlanError for state that is trained, or would be part of gradients."""
        if state.meta["val"].requires_grad:
            raise PlanError(
                f"{_where(state, old)}but it is trained; keep what F writes in buffers"
            )
        if self.trace.values[old].requires_grad and self.training:
            raise PlanError(
                f"{_where(state, old)}and gradients would flow through it into the "
                "call before; detach it: assign new_value.detach()"
            )

    def _replace(self, state: fx.Node, old: fx.Node) -> None:
        """Writes a new value for an attribute into what it was, for later microbatches.

        before: add = n + 1; return add        # self.n = self.n + 1
        after:  add = n + 1; n.copy_(add); return None
        """
        trace = self.trace
        before, after = state.meta["val"], trace.values[old]
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            raise PlanError(
                f"{_where(state, old)}which is {Spec.of(after)} and was "
                f"{Spec.of(before)}; what the model keeps between microbatches must "
                "keep its shape and type, and have no dimension that is the batch"
            )
        placeholder = next(n for n, new in trace.new.items() if new is state)
        value = trace.append(aten.detach.default, old) if after.requires_grad else old
        trace.append(aten.copy_.default, placeholder, value, like=old)


def _is_same(value: Tensor, other: Tensor) -> bool:
    return storage(value) == storage(other) and Spec.of(value) == Spec.of(other)


def _where(state: fx.Node, old: fx.Node) -> str:
    line = user_line(old.meta.get("stack_trace"))
    return f"{state.meta['name']} gets a new value, at\n  {line}\n"
