"""backend.metrics: figures of the last steps, for TensorBoard and as OpenMetrics."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, schedules
from fxsched.clock.timeline import Event
from fxsched.ir.request import Order
from fxsched.jobs.job import Direction, Job
from fxsched.plans.metrics import STEPS, Metrics, WorkerMetrics, metrics_of
from tests import cases
from tests.devices import find_devices


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).mean()


HAND = Metrics(
    0.5,
    3,
    (
        WorkerMetrics(0.75, 10, 4, {"weights": 80.0}),
        WorkerMetrics(0.25, 4, 10, {"weights": 20.0}),
    ),
    7,
)


class Written(list[tuple[str, float, int]]):
    """What a SummaryWriter would be given."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.append((tag, scalar_value, global_step))


def test_openmetrics_has_a_family_for_each_figure() -> None:
    lines = HAND.openmetrics().split("\n")
    assert lines[:4] == [
        "# TYPE fxsched_step_seconds gauge",
        "# UNIT fxsched_step_seconds seconds",
        "# HELP fxsched_step_seconds From the start of a call to the end of its last "
        "job.",
        "fxsched_step_seconds 0.5",
    ]
    assert 'fxsched_busy_share{worker="0"} 0.75' in lines
    assert "# UNIT fxsched_busy_share share" not in lines
    assert 'fxsched_memory_bytes{worker="1",held="weights"} 20.0' in lines
    assert lines[-3:] == ["fxsched_device_peak_bytes 7.0", "# EOF", ""]
    families = [line for line in lines if line.startswith("# TYPE")]
    assert len(families) == len(set(families)) == 6


def test_a_writer_gets_each_figure_once() -> None:
    written = Written()
    HAND.log(written, 9)
    assert ("fxsched/busy_share/worker 1", 0.25, 9) in written
    assert ("fxsched/memory_bytes/worker 0/weights", 80.0, 9) in written
    assert ("fxsched/step_seconds", 0.5, 9) in written
    assert len({tag for tag, _, _ in written}) == len(written) == 10


def test_figures_are_those_of_the_last_steps() -> None:
    schedule = schedules.gpipe(2, 2)
    with fxsched.backend(schedule, stages=["second"], profile=True) as backend:
        with pytest.raises(PlanError, match="no metrics before the first step"):
            backend.metrics  # noqa: B018
        step = torch.compile(Two(), backend=backend)
        for _ in range(STEPS + 2):
            step(torch.randn(4, 4)).backward()
        figures = backend.metrics
        assert backend.plan is not None
    assert figures.steps == STEPS == backend.metrics.steps
    assert all(0 < worker.busy < 1 for worker in figures.workers)
    first, second = figures.workers
    assert first.sent == second.received and second.sent == first.received
    assert first.sent >= 2 * 2 * 4 * 4  # of each microbatch, 2 rows of 4 floats
    assert first.memory == backend.plan.memory[0].each._asdict()


def test_seconds_and_shares_are_medians_over_steps() -> None:
    schedule = schedules.gpipe(2, 2)
    plan = fxsched.plan(Two(), schedule, torch.randn(4, 4), stages=["second"])
    job = plan.jobs[0]
    steps = [(Event(job, 0, 0.0, busy), Event(job, 1, 1.0, 4.0)) for busy in (1, 2, 4)]
    figures = metrics_of(plan, steps)
    assert (figures.seconds, figures.steps) == (4.0, 3)
    assert [worker.busy for worker in figures.workers] == [0.5, 0.75]


def test_without_a_profile_there_are_none() -> None:
    with pytest.raises(PlanError, match=r"no metrics; use backend\(schedule, profile="):
        fxsched.backend(schedules.gpipe(2, 2)).metrics  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize("order", ["static", "dynamic"])
def test_jobs_are_ranges_of_a_profiler_that_runs(order: Order) -> None:
    model, inputs = cases.build("mlp")
    every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    backend = fxsched.backend(schedules.gpipe(2, 2), order=order, profile=True)
    with backend:
        step = torch.compile(model, backend=backend)
        step(*inputs).backward()
        with torch.profiler.profile(experimental_config=every) as profiler:
            step(*inputs).backward()
        assert backend.plan is not None
        jobs = {f"fxsched {job}" for job in backend.plan.jobs}
    found = [e.name for e in profiler.events() if e.name.startswith("fxsched")]
    assert sorted(found) == sorted(jobs)


def test_the_peak_is_that_of_the_device_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = fxsched.plan(nn.Linear(4, 4), schedules.gpipe(1, 1), torch.ones(4, 4))
    steps = [[Event(Job(0, 0, Direction.FORWARD), 0, 0.0, 1.0)]]
    assert metrics_of(plan, steps).device_peak is None
    devices = find_devices(monkeypatch, "xpu", 1)
    assert metrics_of(plan, steps).device_peak == 7
    devices.used = False
    assert metrics_of(plan, steps).device_peak is None
