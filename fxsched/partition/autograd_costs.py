"""What a node's B takes, and the bytes that its F keeps for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from ..ir.graphs import Spec, storage, tensors
from ..ir.modes import trace_modes
from ..ir.request import Device
from .costs import Meter, Operands

# Of B, by operation, arguments and modes: PyTorch's own, whatever the model.
SECONDS: dict[str, float] = {}
MOST = 20_000  # entries


class AutogradCosts:
    """Of the nodes of one graph, run on fake tensors.

    resident: storages of inputs and state, which are there whatever autograd keeps.
    """

    def __init__(
        self, gm: fx.GraphModule, mode: FakeTensorMode, target: Device | None
    ) -> None:
        self.target = target
        self.interpreter, self.mode = fx.Interpreter(gm), mode
        self.resident: set[int] = set()
        self._saved: set[int] = set()  # storages that autograd keeps for B
        self._seconds: dict[str, float] = {}  # of B, by operation and arguments

    @contextmanager
    def saved_bytes(self) -> Iterator[list[int]]:
        """Notes the bytes that autograd keeps for B, each storage once."""
        sizes: list[int] = []
        saved, resident = self._saved, self.resident  # alone: what is saved keeps note

        def note(tensor: Tensor) -> Tensor:
            where = storage(tensor)
            if where not in saved and where not in resident:
                saved.add(where)
                sizes.append(tensor.untyped_storage().nbytes())
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            yield sizes

    def backward_seconds(
        self, node: fx.Node, args: Any, kwargs: Any, values: Mapping[fx.Node, Any]
    ) -> float:
        """Seconds of a node's B; as long as those of an equal node.

        values: of the node and all before it.
        """
        operands = [*args, *kwargs.values()]
        shapes = [
            (Spec.of(t), t.requires_grad)
            for value in (operands, values[node])
            for t in tensors(value)
        ]
        constants = fx.map_arg(
            (node.args, node.kwargs),
            lambda n: None if list(tensors(values[n])) else values[n],
        )
        called = f"{node.op} {node.target} {id(node.target)}"
        key = f"{self.target} {called} {shapes} {constants}"
        seconds = self._seconds
        if getattr(node.target, "namespace", "") == "aten":
            key += str(list(trace_modes()))
            seconds = SECONDS
        if key not in seconds:
            with self.mode:
                run = partial(getattr(self.interpreter, node.op), node.target)
                own = Operands(args, kwargs, written=True)
                backward = own.backward(run(own.args, own.kwargs))
                with Meter(self.target) as meter:
                    backward()
            if len(SECONDS) > MOST:
                SECONDS.clear()
            seconds[key] = meter.total.seconds
        return seconds[key]
