"""Optimizers shared between copies: what moves, and what is alive, on the programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

import fxsched
from fxsched import Plan, Schedule, schedules
from tests.started_ranks import run_ranks
from tests.updates import copied
from tests.zero import even, most_gradients, parameters_received

SHARED: dict[str, Callable[[], Schedule]] = {
    "ddp": lambda: schedules.ddp(4, 8),
    "fsdp": lambda: schedules.fsdp(4, 8),
    "zero1": lambda: schedules.zero1(4, 8),
    "zero2": lambda: schedules.zero2(4, 8),
    "copies": lambda: copied(2),
}


@cache
def planned(name: str, updates: int = 0) -> Plan:
    """A plan with so many updates in a call; 0: the loop steps."""
    model, x = even()
    made = SHARED[name]()
    every = made.microbatches // updates if updates else None
    return fxsched.plan(model, replace(made, update_every=every), x)


@pytest.mark.parametrize("updates", [0, 1, 2])
@pytest.mark.parametrize("schedule", SHARED)
def test_what_is_received_is_as_simulated(schedule: str, updates: int) -> None:
    plan = planned(schedule, updates)
    counted = [parameters_received(program) for program in plan.programs]
    workers = plan.simulate().workers
    assert [size for _, _, size in counted] == [w.parameter_bytes for w in workers]
    fetched = [w.weight_fetches + w.weights_renewed for w in workers]
    assert [weights for _, weights, _ in counted] == fetched
    if plan.schedule.u is not None:  # else totals come too
        returned = sum(w.gradients_returned for w in workers)
        assert sum(sums for sums, _, _ in counted) == returned


@pytest.mark.parametrize("updates", [0, 1])
@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_no_more_is_received_than_with_ddp(name: str, updates: int) -> None:
    ddp, zero = (planned(each, updates) for each in ("ddp", name))
    for measured in (
        lambda plan: [parameters_received(p)[2] for p in plan.programs],
        lambda plan: [w.parameter_bytes for w in plan.simulate().workers],
    ):
        assert sum(measured(zero)) <= sum(measured(ddp))
        assert max(measured(zero)) <= max(measured(ddp))


@pytest.mark.parametrize("updates", [0, 1, 2])
def test_fewer_gradients_are_alive_at_the_peak_than_with_ddp(updates: int) -> None:
    ddp, zero1, zero2 = (
        max(map(most_gradients, planned(each, updates).programs))
        for each in ("ddp", "zero1", "zero2")
    )
    assert zero2 < 0.75 * ddp
    assert zero2 <= zero1 <= ddp


def test_each_worker_has_a_share_of_the_parameters() -> None:
    plan = planned("zero1")
    shares = [0.0] * 4
    for stage, data in plan.stages.nodes(data=True):
        updater = plan.schedule.updater(stage)
        assert updater is not None
        shares[updater] += data["parameters"] / (16 * 25 * 24)
    assert shares == pytest.approx([0.25] * 4, rel=0.1)


@pytest.mark.slow
def test_ranks_equal_the_plain_loop_and_share_the_optimizer() -> None:
    done = run_ranks(4, "tests.ranks_updates")
    assert done.stdout.count("equal to the plain loop") == 4 * 8, done.stdout
    assert done.stdout.count("a fourth of the optimizer") == 4 * 2, done.stdout
