"""The traces that torch.export made of one model, and which of them a call may use."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor, nn

from ..ir.modes import casts, modes_after_errors
from ..ir.request import Request
from ..jobs.job import PlanError
from ..torch_compat.module_reads import noted_reads
from .caller import Structure, read_signature
from .exported_graph import ExportedGraph, ModelRun, export_model
from .noted_values import Change, Noted, noted_model
from .samples import symbolic_dim
from .torch_calls import (
    without_drawn_numbers,
)

TRACES = 64  # of a model that are kept
Sizes = tuple[tuple[int, ...], ...]


class Trace:
    """A traced graph, and what must be as it was for it to be that of a call.

    key: of the call's structure, types and modes.
    sizes: shapes of calls that it serves.
    read: what the model's Python read.
    """

    def __init__(
        self,
        key: Hashable,
        sizes: Sizes,
        graph: ExportedGraph,
        read: Sequence[Noted],
    ) -> None:
        self.key, self.sizes, self.graph, self.read = key, {sizes}, graph, read
        self.kinds = list(map(_kind, graph.state))

    def serves(self, key: Hashable, call: Structure) -> bool:
        """Whether it is of this kind of call, the model aside."""
        sizes = _sizes(call)
        if key == self.key and sizes not in self.sizes:
            self.sizes.update([sizes] if self.graph.fits(call.tensors) else [])
        return key == self.key and sizes in self.sizes

    def stale(self) -> str | None:
        """What of the model is another than when it was traced."""
        for noted in self.read:
            for change in noted.changes():
                return str(change)
        if list(map(_kind, self.graph.state)) != self.kinds:
            return "types of its weights, or which of them are trained"
        return None


class Traces:
    """Those of one model.

    request: what is to be cut into microbatches.
    say: told why a call is traced again.
    """

    def __init__(
        self, model: nn.Module, request: Request, say: Callable[[str], None]
    ) -> None:
        self.model, self.request, self.say = model, request, say
        self.traces: list[Trace] = []

    def graph_of(self, call: Structure) -> ExportedGraph:
        """The graph for a call, (args, kwargs), traced now if there is none.

        Raises PlanError, with the user's line, for what cannot be traced.
        """
        layouts = tuple((each.dim(), each.is_contiguous()) for each in call.tensors)
        key = (call.key, tuple(map(_kind, call.tensors)), layouts, _modes())
        stale: list[str] = []
        for trace in reversed(self.traces):
            if trace.serves(key, call):
                why = trace.stale()
                if why is None:
                    return trace.graph
                stale.append(why)
        for why in stale[:1]:
            self.say(f"traced again, {why}")
        self.traces = [*self.traces[1 - TRACES :], self._trace(key, call)]
        return self.traces[-1].graph

    def _trace(self, key: Hashable, call: Structure) -> Trace:
        """Traces it; twice if it wrote into the model, as some do in a first call."""
        first: Sequence[Change] = ()
        while True:
            run = ModelRun(self.model, call)
            with noted_reads() as reads, without_drawn_numbers():
                graph = self._export(run, key)
            if not run.changes:
                break
            if first or any(change.holds_traced() for change in run.changes):
                for change in reversed(first):
                    change.undo()
                raise _keeps(run.changes[0])
            first = run.changes
            for change in first:
                change.redo()
        inside = noted_model({"self": self.model, **run.guards.modules}, reads)
        return Trace(key, _sizes(call), graph, (inside, run.guards))

    def _export(self, run: ModelRun, key: Hashable) -> ExportedGraph:
        """The graph, in which sizes are symbolic that are others in a microbatch, or
        were in an earlier trace of such a call, as in Dynamo's second graph."""
        args, kwargs = run.call.value
        named = read_signature(self.model.forward, args, kwargs)
        batch = {id(t): symbolic_dim(a, t, self.request) for a, t in named.tensors}
        earlier = [s for each in self.traces if each.key == key for s in each.sizes]
        dims = [
            [
                dim
                for dim, size in enumerate(tensor.shape)
                if dim == batch.get(id(tensor))
                or any(size != sizes[i][dim] for sizes in earlier)
            ]
            for i, tensor in enumerate(run.call.tensors)
        ]
        with modes_after_errors():
            return export_model(run, named, dims)


def _keeps(change: Change) -> PlanError:
    return PlanError(
        f"the model's forward writes to {change.path}, which would happen once, while "
        "it is traced, and not in each call; keep it in a buffer (register_buffer, "
        "and .copy_() or .add_() in forward), or write it outside of forward"
    )


def _sizes(call: Structure) -> Sizes:
    return tuple(tuple(tensor.shape) for tensor in call.tensors)


def _kind(tensor: Tensor) -> Hashable:
    return tensor.dtype, tensor.device, tensor.requires_grad


def _modes() -> Hashable:
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return *modes, torch.get_default_dtype(), tuple(casts())
