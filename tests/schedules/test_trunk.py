"""Schedules for encoders beside a trunk."""

from __future__ import annotations

import networkx as nx
import pytest

from fxsched import schedules, simulate
from fxsched.schedules.trunk import encoder_stages

from ..bench.trunk import Case, State, even_cut, step, tree

COUNTS = (8, 32, 64)


def case(
    encoders: int, state: State = "trained", microbatches: int = 8, ratio: int = 3
) -> Case:
    return Case(ratio, encoders, state, 4, microbatches)


def test_the_trunk_begins_where_all_inputs_have_met() -> None:
    assert encoder_stages(tree(case(3)), 4) == {0, 1, 2, 3}
    cross: nx.DiGraph[int] = nx.DiGraph([(0, 1), (1, 3), (2, 4), (3, 4), (1, 4)])
    assert encoder_stages(cross, 2) == {0, 1, 2, 3}


def test_the_trunk_of_a_chain_is_its_last_stages_one_a_worker() -> None:
    assert encoder_stages(tree(case(1)), 4) == {0, 1, 2, 3}
    assert encoder_stages(tree(case(1)), 3) == {0, 1, 2, 3, 4}
    assert encoder_stages(tree(case(1)), 9) == set()


@pytest.mark.parametrize("name", ["bubble_filled", "nested"])
@pytest.mark.parametrize("encoders", [1, 3])
def test_stages_of_the_trunk_are_on_workers_in_turns(name: str, encoders: int) -> None:
    found = simulate(schedules.LIBRARY[name](4, 8), tree(case(encoders)), None)
    jobs = found.timeline.jobs
    where = {jobs.kinds[jobs.kind[j]][0]: jobs.worker[j] for j in range(len(jobs))}
    assert [where[s] for s in range(4, 8)] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("encoders", [1, 3])
def test_nested_holds_as_much_of_encoders_however_many_microbatches(
    encoders: int,
) -> None:
    steps = [step("nested", case(encoders, microbatches=count)) for count in COUNTS]
    assert len({each.caps for each in steps}) == 1
    assert steps[1].encoders == pytest.approx(steps[2].encoders)
    for each, count in zip(steps, COUNTS, strict=True):
        free = step("bubble_filled", case(encoders, microbatches=count))
        assert each.seconds <= 1.03 * free.seconds
        assert count < 32 or each.encoders < free.encoders


@pytest.mark.parametrize("encoders", [1, 3])
def test_encoders_in_bubbles_are_faster_than_a_line(encoders: int) -> None:
    line = step("1f1b", case(encoders)).seconds
    states: tuple[State, ...] = ("trained", "frozen")
    for state in states:
        for name in ("bubble_filled", "nested"):
            assert step(name, case(encoders, state)).seconds < line


@pytest.mark.parametrize("encoders", [1, 3])
@pytest.mark.parametrize("count", [8, 32])
def test_a_frozen_trunk_makes_room_for_adapters(encoders: int, count: int) -> None:
    behind = case(encoders, "adapters", count, ratio=1)
    free = step("bubble_filled", behind).seconds
    assert free <= step("graph", behind).seconds
    assert step("nested", behind).seconds <= 1.03 * free


def test_frozen_encoders_hold_nothing_and_have_no_backward() -> None:
    stages = tree(case(3, "frozen"))
    found = simulate(schedules.nested(4, 8), stages, None)
    assert {s for s, d in found.timeline.jobs.kinds if str(d) == "B"} == {4, 5, 6, 7}
    assert step("nested", case(3, "frozen")).encoders == 0


def test_layers_are_cut_where_the_largest_part_is_least() -> None:
    assert even_cut([1.0, 1.0, 2.0, 2.0, 1.0], 3) == [2, 3]
