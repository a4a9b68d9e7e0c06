"""Published numbers, case by case; tests/reference has them as data.

parallelsim.json: outputs of parallelsim.py of github.com/a-rahimi/parallel-training at
e05be6f. zero_bubble.json: bubble rates of Zero Bubble Pipeline Parallelism.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fxsched import Schedule, schedules, simulate

REFERENCE = Path(__file__).parents[1] / "reference"
Case = dict[str, Any]


def cases(name: str) -> list[Any]:
    found = json.loads((REFERENCE / f"{name}.json").read_text())
    return [pytest.param(case, id=label(case)) for case in found]


def label(case: Case) -> str:
    sizes = f"{case['workers']} workers, {case['microbatches']} microbatches"
    return f"{case['name']} {case['order']}: {sizes}" if "name" in case else sizes


def published(case: Case) -> Schedule:
    """The schedule of a case of parallelsim, in the library's own order."""
    workers, microbatches = case["workers"], case["microbatches"]
    if "group_size" in case:
        group_size, stages = case["group_size"], case["stages"]
        make = schedules.LIBRARY[case["name"]]
        return make(workers, group_size, microbatches, stages=stages)
    return schedules.LIBRARY[case["name"]](workers, microbatches)


def in_its_order(case: Case) -> Schedule:
    stages = case["stages"]
    n = schedules.oldest_microbatch_first(stages)
    if case["order"] == "oldest_stage_first":
        n = schedules.oldest_stage_first(stages, case["microbatches"])
    return replace(published(case), n=n)


def assert_equal(schedule: Schedule, case: Case) -> None:
    ran = simulate(schedule, case["stages"])
    workers = ran.workers
    assert ran.latency == case["latency"]
    assert ran.throughput == pytest.approx(case["throughput"])
    assert [w.busy for w in workers] == case["busy_time"]
    held = [w.peak_activations for w in workers]
    assert held == case["max_activation_storage"]
    sent = [w.weight_transmissions for w in workers]
    assert sent == case["weight_transmissions"]


@pytest.mark.parametrize("case", cases("parallelsim"))
def test_parallelsim(case: Case) -> None:
    assert_equal(in_its_order(case), case)
    if case["name"] != "gpipe":  # whose own order is all F before the first B
        assert_equal(published(case), case)


@pytest.mark.parametrize("case", cases("parallelsim"))
def test_parallelsim_weights(case: Case) -> None:
    ran = simulate(published(case), case["stages"])
    assert [w.weights_held for w in ran.workers] == case["weight_storage"]


RATES: dict[str, Callable[..., float]] = {
    "1f1b": lambda ran: ran.bubble_rate,
    "zb_h1": lambda ran: ran.bubble_rate,
    "zb_h2": lambda ran: ran.span_bubble_rate,
}


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize("case", cases("zero_bubble"))
def test_zero_bubble(case: Case, name: str) -> None:
    schedule = schedules.LIBRARY[name](case["workers"], case["microbatches"])
    durations = {
        "F": case["forward"],
        "B": case["backward_input"],
        "W": case["backward_weight"],
    }
    if not schedule.split_backward:
        durations["B"] += durations.pop("W")
    ran = simulate(schedule, durations=durations, transfer=case["transfer"])
    assert round(RATES[name](ran), 4) == case[name]
