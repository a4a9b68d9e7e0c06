"""What tables, pictures and comparisons say of updates."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch

import fxsched
from fxsched import PlanError, Schedule, schedules
from tests.checker.test_check import Chain


def twice() -> Schedule:
    """Two workers with copies, and two updates of both stages in a call."""
    return replace(schedules.ddp(2, 4), stages=2, update_every=2)


def test_a_table_says_which_version_a_job_reads() -> None:
    plan = fxsched.plan(Chain(), schedules.stale_by_one(2, 8), torch.ones(8, 3))
    rows = {line.split()[1]: line for line in plan.table(1).splitlines()[3:]}
    assert rows["1F0"].endswith(" 1 here") and " 1 v0 here " in rows["1B2"]
    assert rows["1F4"].endswith(" 1 v1 here")
    assert " 1B1 here " in rows["1U1"] and " v0 " not in rows["1U1"]


def test_a_summary_says_who_updates_what() -> None:
    plan = fxsched.plan(Chain(), twice(), torch.ones(4, 3))
    note = "updates every 2 microbatches; of stages on workers: 0+1 on 0, 0+1 on 1"
    assert note in str(plan) and note in plan.text()
    spread = replace(twice(), u=lambda s, b: s)
    plan = fxsched.plan(Chain(), spread, torch.ones(4, 3))
    assert "of stages on workers: 0 on 0, 1 on 1" in str(plan)


def test_an_order_that_goes_past_an_update_says_what_to_do() -> None:
    strict = replace(schedules.zb_h1(2, 4), update_every=2)
    message = r"in_order stops the schedule zb_h1.* runs.*replace\(.*, in_order=False"
    with pytest.raises(PlanError, match=message):
        fxsched.simulate(strict)
    with pytest.raises(PlanError, match=message):
        fxsched.plan(Chain(), strict, torch.ones(4, 3))
    assert fxsched.simulate(replace(strict, in_order=False)).latency


def test_a_text_diagram_marks_updates_that_take_no_time() -> None:
    found = fxsched.simulate(schedules.pipedream(2, 4))
    lines = found.diagram().text(60, color=False).splitlines()[2:4]
    assert [line.count("U") for line in lines] == [4, 4]


def test_a_step_in_which_several_workers_run_one_update_is_compared() -> None:
    model = Chain()
    backend = fxsched.backend(
        twice(),
        profile=True,
        transport="threads",
        optimizer=torch.optim.SGD(model.parameters()),
    )
    torch.compile(model, backend=backend)(torch.ones(4, 3))
    assert backend.plan is not None
    text = backend.plan.compare(backend.timeline)
    assert " U " in text and "order of jobs" in text
    updates = [e for e in backend.timeline if e.job.direction == "U"]
    assert sorted((str(e.job), e.worker) for e in updates) == [
        (f"{s}U{b}", worker) for s in (0, 1) for b in (1, 3) for worker in (0, 1)
    ]
    measured = backend.plan.simulate(backend.timeline)
    assert len(measured.timeline) == len(backend.timeline)
    took = [e.end - e.start for e in updates if e.job.stage == 0]
    (timed,) = {e.end - e.start for e in measured.timeline if str(e.job) == "0U1"}
    assert timed == pytest.approx(statistics.median(took), abs=1e-9)
