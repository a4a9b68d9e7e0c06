"""What the first call does once, however often the model has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxsched
from fxsched import Schedule, schedules
from fxsched.autodiff.inductor import compile_stages


class Chain(nn.Module):
    """Layers that are alike, with dropout."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.5))
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def traces(reset: bool) -> int:
    """How often Dynamo traces a model for its first call."""
    backend = fxsched.backend(schedules.one_f_one_b(2, 4), transport="threads")
    graphs = []

    def counting(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        graphs.append(gm)
        return backend(gm, inputs)

    counting.__wrapped__ = backend  # type: ignore[attr-defined]
    if reset:
        torch._dynamo.reset()
    step: Any = torch.compile(Chain(), backend=counting)
    step(torch.randn(8, 8)).backward()
    return len(graphs)


@pytest.mark.parametrize("reset", [False, True])
def test_dynamo_knows_the_batch_before_it_traces(reset: bool) -> None:
    assert traces(reset) == 1


def middle(schedule: Schedule) -> list[fx.GraphModule]:
    """The flat forward graphs of the two stages that read and give the same."""
    names = [f"layers.{i}" for i in range(1, 4)]
    plan = fxsched.plan(Chain(), schedule, torch.randn(8, 8), stages=names)
    found = []
    for stage in (1, 2):
        wrapper: Any = plan.programs[stage].get_submodule(f"forward_{stage}")
        found.append(wrapper.flat_forward)
    return found


def test_stages_that_are_alike_are_differentiated_once() -> None:
    one, other = middle(schedules.one_f_one_b(4, 4))
    assert one is other


@pytest.mark.slow
def test_graphs_that_are_alike_are_compiled_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of plans of their own too, which share no graph."""
    graphs = [middle(schedules.one_f_one_b(4, 4))[0] for _ in range(2)]
    assert graphs[0] is not graphs[1]
    compiled = []

    def count(gm: fx.GraphModule) -> Any:
        compiled.append(gm)
        return gm.forward

    monkeypatch.setattr("fxsched.autodiff.inductor._inductor", count)
    stages = [fx.GraphModule({"flat": graph}, _call(graph)) for graph in graphs]
    programs = [
        fx.GraphModule({"stage": stage}, _call(stage, "stage")) for stage in stages
    ]
    compile_stages(programs)
    assert len(compiled) == 1
    assert stages[0].flat is stages[1].flat


def _call(inner: fx.GraphModule, name: str = "flat") -> fx.Graph:
    graph = fx.Graph()
    given = [
        graph.placeholder(n.name) for n in inner.graph.find_nodes(op="placeholder")
    ]
    graph.output(graph.call_module(name, tuple(given)))
    return graph
