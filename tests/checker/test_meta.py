"""Plans without values: of models on the meta device, and of stages without a W."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import Direction, PlanError, schedules
from fxsched.models.gpt import GPT, GPTConfig

CONFIG = GPTConfig(vocabulary=16, length=8, width=8, heads=2, layers=2)


class Middle(nn.Module):
    """Three parts, of which the second has no weights; makes tensors on its device."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + torch.arange(8, device=x.device)
        return self.last(self.act(x)).mean()


@pytest.mark.slow
def test_a_model_on_meta_is_planned_as_on_the_cpu() -> None:
    schedule = schedules.one_f_one_b(2, 2)
    tokens = torch.zeros(4, 8, dtype=torch.long)
    with torch.device("meta"):
        model = GPT(CONFIG)
    plan = fxsched.plan(model, schedule, tokens.to("meta"), tokens.to("meta"))
    same = fxsched.plan(GPT(CONFIG), schedule, tokens, tokens.clone())
    assert plan.trains and plan.jobs == same.jobs
    assert plan.text() == same.text()
    plan.check()


def test_tensors_that_the_model_makes_follow() -> None:
    with torch.device("meta"):
        model, x = Middle(), torch.zeros(4, 8)
    plan = fxsched.plan(model, schedules.gpipe(2, 2), x)
    assert plan.trains and "meta" not in str(plan.stages.nodes(data=True))


def test_a_model_on_meta_has_nothing_to_run_with() -> None:
    with torch.device("meta"):
        model, x = Middle(), torch.zeros(4, 8)
    step = torch.compile(model, backend=fxsched.backend(schedules.gpipe(2, 2)))
    with pytest.raises(PlanError, match=r"meta device .* run with; fxsched.plan plans"):
        step(x)
    with pytest.raises(PlanError, match=r"be measured with; fxsched.plan estimates"):
        fxsched.profile(model, x)


def test_durations_are_asked_for_jobs_that_are_there() -> None:
    schedule = schedules.zb_h1(3, 2)
    stages = ["first", "act", "last"]
    plan = fxsched.plan(Middle(), schedule, torch.zeros(4, 8), stages=stages)
    missing = {job.stage for job in plan.jobs if job.direction is Direction.WEIGHT}
    assert missing == {0, 2}
    taken = {event.job: event.end - event.start for event in plan.timeline}
    found = plan.simulate(taken.__getitem__, transfer=0.0)
    assert len(found.timeline) == len(plan.jobs)
