"""Plans of one call by several schedules, for which Dynamo traces the model once."""

from __future__ import annotations

from typing import Any

import pytest

import fxsched
from fxsched import PlanError, Schedule, schedules
from fxsched.backend import Backend
from fxsched.dry_run import Planner

from ..cases import mlp


def test_dynamo_traces_the_model_once_and_plans_are_those_of_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced, compiled = [], Backend.__call__

    def call(self: Backend, *args: Any, **options: Any) -> Any:
        traced.append(self)
        return compiled(self, *args, **options)

    model, inputs = mlp()
    planner = Planner(model, *inputs, carry="recompute")
    several = [schedules.one_f_one_b(2, 4), schedules.ddp(2), schedules.gpipe(3, 2)]
    wanted = [
        fxsched.plan(model, schedule, *inputs, carry="recompute").explain()
        for schedule in several
    ]
    monkeypatch.setattr(Backend, "__call__", call)
    assert [planner.plan(schedule).explain() for schedule in several] == wanted
    assert len(traced) == 1
    with pytest.raises(PlanError, match="does not divide into 3 microbatches"):
        planner.plan(Schedule(1, 3))
    saved = planner.plan(several[0], carry="saved")
    monkeypatch.undo()
    plain = fxsched.plan(model, several[0], *inputs)
    assert saved.explain() == plain.explain() != wanted[0]
