"""Profiles of models: what is measured, and how it is fitted to steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

import fxsched
from fxsched import PlanError, profiling, schedules
from fxsched.partition.measure import _TimedPass

from ..partition.test_partition import Bulky, Chain, Masked, Wide, rows, seconds


@pytest.mark.slow
def test_a_profile_replaces_estimates() -> None:
    class Slow(Chain):
        def forward(self, x: Tensor) -> Tensor:
            for i, layer in enumerate(self.layers):
                x = torch.tanh(layer(x))
                if i < 2:  # many operations that are estimated at next to nothing
                    x = torch.linalg.matrix_exp(x @ x.T / 1e3) @ x
            return x.mean()

    model, x = Slow(8), torch.randn(256, 16)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    profile = fxsched.profile(model, x, repeats=2)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    keys = [key for key in profile.measured if "matrix_exp" in key]
    assert len(keys) == 2
    ratios = [profile.measured[k].over(profile.estimated[k]).forward for k in keys]
    assert min(ratios) > 3
    plan = fxsched.plan(model, schedules.gpipe(2, 1), x, profile=profile)
    total = sum(sum(times) for times in profile.measured.values())
    assert sum(seconds(plan)) == pytest.approx(total, rel=0.01)


@pytest.mark.slow
def test_a_profile_is_fitted_to_steps_that_ran() -> None:
    model, x, schedule = Wide(8), torch.ones(512, 512), schedules.gpipe(2, 4)
    plan = fxsched.plan(model, schedule, x)
    (first, second), ran = seconds(plan), []
    for pace in (2.9, 3.0, 4.0):  # of stage 0, as long as planned
        step = []
        for event in plan.timeline:
            taken = (event.end - event.start) * (1 if event.job.stage else pace)
            step.append(event._replace(end=event.start + taken))
        ran.append(step)
    profile = plan.profile(*ran)
    assert [len(data["modules"]) for _, data in plan.stages.nodes(data=True)] == [4, 4]
    same = fxsched.plan(model, schedule, x, stages=["layers.4"], profile=profile)
    assert seconds(same) == pytest.approx([3 * first, second], rel=0.02)
    again = fxsched.plan(model, schedule, x, profile=profile)
    assert len(again.stages.nodes[0]["modules"]) == 3  # 9 of 16, where 4 were 12
    for wrong in ([], [ran[0][1:]], [ran[0] + ran[0][:1]]):
        with pytest.raises(PlanError, match="with each of its 16 jobs once"):
            plan.profile(*wrong)


def test_a_profile_can_be_made_where_gradients_are_off() -> None:
    model, x = Wide(2), torch.ones(512, 512)
    with torch.inference_mode():
        profile = fxsched.profile(model, x, repeats=1)
    f, b = (sum(each[i] for each in profile.measured.values()) for i in (0, 1))
    assert b > f / 4


def test_a_profile_leaves_out_the_steps_of_a_model_that_needs_more_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any) -> None:
        raise PlanError("declare outputs=")

    monkeypatch.setattr(profiling, "make_step", refuse)
    profile = fxsched.profile(Masked(4), rows(), repeats=1)
    assert all(f >= 0 < f + b for f, b in profile.measured.values())


@pytest.mark.parametrize(("layers", "tried"), [(2, [8, 1]), (8, [8])])
def test_a_profile_is_fitted_to_eight_stages_or_to_one(
    layers: int, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, make = [], profiling.make_step

    def made(gm: Any, args: Any, options: Any, workers: Any) -> Any:
        asked.append(options.schedule.stages)
        return make(gm, args, options, workers)

    monkeypatch.setattr(profiling, "make_step", made)
    fitted = list[Any]()
    profile = fxsched.Plan.profile

    def spied(plan: Any, *steps: Any) -> Any:
        fitted.append((plan, steps))
        return profile(plan, *steps)

    monkeypatch.setattr(fxsched.Plan, "profile", spied)
    found = fxsched.profile(Wide(layers), torch.ones(512, 512), microbatches=2)
    assert asked == tried
    ((plan, steps),) = fitted
    wanted = profile(plan, *steps).measured
    assert found.measured == wanted
    ran = [(event.job.microbatch, event.job.direction.name) for event in steps[0]]
    one = [(0, "FORWARD"), (1, "FORWARD"), (0, "BACKWARD"), (1, "BACKWARD")]
    assert list(dict.fromkeys(ran)) == one  # two microbatches in flight


def test_a_profile_has_nodes_that_its_steps_have_otherwise() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
    profile = fxsched.profile(model, torch.randn(32, 16), microbatches=4, repeats=1)
    assert any("batch_norm" in key for key in profile.measured)
    assert profile.measured.keys() == profile.estimated.keys()


def test_a_profile_of_another_model_is_an_error() -> None:
    profile = fxsched.profile(Masked(4), rows(), repeats=1)
    with pytest.raises(PlanError, match="profile is of another model"):
        fxsched.plan(Bulky(), schedules.gpipe(2, 1), rows().long(), profile=profile)


def test_a_profile_waits_for_the_devices_of_its_model_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    fxsched.profile(nn.Linear(4, 4), torch.ones(4, 4), repeats=1)
    assert waited == []
    graph = fx.Graph()
    with FakeTensorMode():
        graph.placeholder("x").meta["val"] = torch.ones(2, device="cuda:1")
    graph.output(None)
    _TimedPass(fx.GraphModule({}, graph), (), 1).now()
    assert waited == [torch.device("cuda:1")]
