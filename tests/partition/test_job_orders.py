"""The search for orders of single jobs, against the clock and against CP-SAT."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from fxsched import plan, schedules, verify
from fxsched.accounts.paper import held_memory
from fxsched.partition.job_orders import JobOrders

from ..cases import gpt
from ..optimum import case, optimum, searched
from .test_layouts import branches, chain, layouts


@pytest.mark.parametrize("split", [False, True])
def test_an_order_takes_and_holds_what_the_clock_says(split: bool) -> None:
    for seed in range(6):
        random = Random(seed)
        found = layouts(branches(random), 2 + seed % 2, split)
        layout = chain(found)
        for _ in range(30):
            changed = found.moves.changed(layout, random)
            if changed is not None and found.run(changed) is not None:
                layout = changed
        ran = found.run(layout)
        assert ran is not None
        schedule, stages, _, workers = ran.made
        held = held_memory(schedule, stages, ran.events)
        most = max(memory.total for memory in held)
        for share in (0.999, 1.001):  # of what it holds
            orders = JobOrders(schedule, stages, share * most)
            runs = tuple(map(tuple, workers))
            start = orders.walk(runs, ran.events.order, 0, random)
            fits = share > 1
            assert start.seconds == pytest.approx(ran.seconds if fits else inf)


def test_where_orders_of_jobs_matter_a_search_finds_what_is_optimal() -> None:
    for number in (31, 43):  # without them 7 and 18 % above
        each = case(number)
        best, proven = optimum(each, 60)
        assert proven and searched(each) <= 1.03 * best


def test_a_strict_order_that_is_found_under_a_limit_equals_eager() -> None:
    model, inputs = gpt()
    schedule = schedules.auto(2, 4, split_backward=True)
    free = plan(model, schedule, *inputs)
    limit = 0.76 * max(peaks.at_once.total for peaks in free.memory)
    assert plan(model, schedule, *inputs, memory_limit=limit).schedule.in_order
    assert verify(model, schedule, *inputs, memory_limit=limit).passed
