"""What several plans of a test, or of a file of tests, have in common is traced once:
the same models are trained under many schedules, which often cut them alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from fxsched import Backend
from fxsched.autodiff.stage_graphs import stage_key
from fxsched.passes import differentiate


class Switch:
    """A model that Dynamo traces once, for many backends."""

    def __init__(self, model: nn.Module, first: Backend) -> None:
        self.chosen = first
        switch = self

        class Switched(Backend):
            def run(self, gm: fx.GraphModule, args: tuple[Any, ...]) -> Sequence[Any]:
                return switch.chosen.run(gm, args)

        self.compiled = torch.compile(model, backend=Switched(first.options))

    def __call__(self, backend: Backend, *inputs: Any) -> Any:
        self.chosen = backend
        return self.compiled(*inputs)


@contextmanager
def stages_traced_once() -> Iterator[None]:
    """Where stages of several plans that compute the same are traced once, as those of
    one plan are."""
    real, known = differentiate.trace_stage, {}

    def trace(module: fx.GraphModule, *args: Any) -> Any:
        cast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        key = stage_key(module), args[:-1], cast  # without the fake mode
        if key not in known:
            # with the module, for the key has the ids of what is in it
            known[key] = real(module, *args), module
        return known[key][0]

    differentiate.trace_stage = trace
    try:
        yield
    finally:
        differentiate.trace_stage = real
