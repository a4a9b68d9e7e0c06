"""Passes of the user's over the model's graph of one microbatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxsched
from fxsched import PlanError, schedules
from fxsched.ir.request import Request

GELU = torch.ops.aten.gelu.default


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x))).square().mean()


def tanh(gm: fx.GraphModule, request: Request) -> fx.GraphModule:
    """GELU by its approximation."""
    for node in gm.graph.nodes:
        if node.target is GELU:
            node.kwargs = {"approximate": "tanh"}
    return gm


def twice(gm: fx.GraphModule, request: Request) -> fx.GraphModule:
    """GELU of twice its input, of nodes of its own."""
    for node in gm.graph.find_nodes(op="call_function", target=GELU):
        with gm.graph.inserting_before(node):
            double = gm.graph.call_function(torch.mul, (node.args[0], 2.0))
        node.args = (double,)
    return gm


def net() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(8, 8)


def test_a_pass_changes_the_model_before_it_is_cut() -> None:
    model, x = net()
    backend = fxsched.backend(schedules.gpipe(2, 4), model_passes=[tanh, twice])
    loss = torch.compile(model, backend=backend)(x)
    loss.backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    hidden = nn.functional.gelu(2 * model.up(x), approximate="tanh")
    wanted = model.down(hidden).square().mean()
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(found, [p.grad for p in model.parameters()])


def test_shards_are_of_what_passes_made() -> None:
    model, x = net()
    schedule = schedules.sharded(schedules.gpipe(1, 2), 2)
    run = torch.compile(model, backend=fxsched.backend(schedule, model_passes=[twice]))
    hidden = nn.functional.gelu(2 * model.up(x))
    torch.testing.assert_close(run(x), model.down(hidden).square().mean())


def test_plan_and_profile_take_model_passes() -> None:
    model, x = net()
    seen = []

    def note(gm: fx.GraphModule, request: Request) -> fx.GraphModule:
        seen.append(request.schedule.microbatches)
        return twice(gm, request)

    profile = fxsched.profile(model, x, repeats=1, model_passes=[note])
    plan = fxsched.plan(
        model, schedules.gpipe(2, 4), x, profile=profile, model_passes=[note]
    )
    # for nodes, for steps of eight stages, which it hasn't, and of one; for the plan
    assert seen == [1, 1, 1, 4] and len(plan.nodes) > 4


def raising(gm: fx.GraphModule, request: Request) -> fx.GraphModule:
    raise ValueError("mine")


def without_return(gm: fx.GraphModule, request: Request) -> Any:
    tanh(gm, request)


def with_input(gm: fx.GraphModule, request: Request) -> fx.GraphModule:
    gm.graph.placeholder("more")
    return gm


def impossible(gm: fx.GraphModule, request: Request) -> fx.GraphModule:
    for node in gm.graph.find_nodes(op="call_function", target=GELU):
        node.target = torch.linalg.inv
    return gm


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (raising, ValueError, "mine"),
        (
            without_return,
            PlanError,
            "the pass without_return returned None; it must re",
        ),
        (
            with_input,
            PlanError,
            "the pass with_input changed the inputs of the model's",
        ),
        (impossible, PlanError, "the pass impossible makes a node that can't run"),
    ],
)
def test_a_pass_that_breaks_the_graph_is_named(
    given: Any, error: type[Exception], message: str
) -> None:
    model, x = net()
    with pytest.raises(error, match=message):
        fxsched.plan(model, schedules.gpipe(2, 4), x, model_passes=[given])


def test_passes_that_are_no_functions_are_refused() -> None:
    with pytest.raises(
        PlanError, match=r"model_passes=3\): give a list of functions \(gm"
    ):
        fxsched.backend(schedules.gpipe(2, 4), model_passes=3)  # type: ignore[arg-type]
