"""check_finite=True names the first job that made a NaN or Inf."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, schedules
from fxsched.ir import ops


class Model(nn.Module):
    """Two layers; attention's mask is of -inf, which is no fault."""

    def __init__(self, bad: str = "") -> None:
        super().__init__()
        self.a, self.b, self.bad = nn.Linear(4, 4), nn.Linear(4, 4), bad

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros_like(x).masked_fill(x > 5, -torch.inf)
        h = (self.a(x) + mask).softmax(-1)
        h = fxsched.stage_boundary(h)
        if self.bad == "F":
            h = torch.log(h - 2)
        if self.bad == "B":
            h = torch.sqrt(h - h.detach())
        return self.b(h).mean()


def step(bad: str, order: str = "static") -> Tensor:
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    schedule = schedules.gpipe(2, 4)
    with fxsched.backend(schedule, order=order, check_finite=True) as backend:
        return torch.compile(Model(bad), backend=backend)(x)


@pytest.mark.parametrize(
    ("bad", "order", "job", "code"),
    [
        ("F", "static", r"1F\d made NaN in \w+", r"torch\.log\("),
        ("B", "dynamic", r"1B\d made (NaN|Inf) in grad_\w+", r"torch\.sqrt\("),
    ],
)
def test_the_job_and_the_line_are_named(
    bad: str, order: str, job: str, code: str
) -> None:
    with pytest.raises(FloatingPointError, match=job) as caught:
        step(bad, order)
    (note,) = (n for n in caught.value.__notes__ if n.startswith("fxsched: in job"))
    assert re.search(rf"on worker 1\n  at .*in forward: .*{code}", note)


def test_an_update_is_named() -> None:
    torch._dynamo.reset()
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.inf)
    options = {"optimizer": optimizer, "check_finite": True}
    with fxsched.backend(schedules.gpipe(2, 4), **options) as backend:
        train = torch.compile(model, backend=backend)
        with pytest.raises(
            FloatingPointError, match=r"\dU3 made (NaN|Inf) in weights_\d"
        ):
            train(torch.randn(8, 4))


@pytest.mark.slow
def test_finite_steps_go_on_and_nothing_is_added_without_it() -> None:
    assert step("").isfinite()
    x = torch.randn(8, 4)
    for checks in (True, False):
        schedule = schedules.zb_h1(2, 4)
        plan = fxsched.plan(Model(), schedule, x, check_finite=checks)
        nodes = [node for program in plan.programs for node in program.graph.nodes]
        jobs = sum("job" in node.meta for node in nodes)
        assert sum(node.target is ops.finite for node in nodes) == checks * jobs


def test_it_is_true_or_false() -> None:
    with pytest.raises(PlanError, match=r"check_finite=1\): give True or False"):
        fxsched.backend(schedules.gpipe(2, 4), check_finite=1)
