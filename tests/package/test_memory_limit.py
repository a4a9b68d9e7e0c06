"""Which limits plans are made for until one is within the limit that was given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import networkx as nx
import pytest

from fxsched import schedules
from fxsched.ir.request import Request
from fxsched.memory_limit import plan_within
from fxsched.options import Options
from fxsched.partition.planner import MemoryLimitError


def limits_of(
    held: Callable[[float], float], limit: float, cut: dict[str, int] | None = None
) -> tuple[list[float], Any]:
    """The limits that plans are made for, and what comes of it.

    held: bytes of a plan that is made for a limit; an error's least, if negative.
    cut: of these plans, which can't be made again with it.
    """
    asked: list[float] = []

    def make(request: Request) -> Any:
        if request.memory_limit is None:
            size = 200.0
        else:
            asked.append(request.memory_limit)
            size = held(request.memory_limit)
            if request.schedule.cut is not None:
                raise MemoryLimitError("too much", limit / 2)
            if size < 0:
                raise MemoryLimitError("too much", -size)
        at_once = SimpleNamespace(total=size, _asdict=lambda: {"weights": size})
        stages = nx.path_graph(2, nx.DiGraph)
        for data in stages.nodes.values():
            data.update(forward=1.0, backward=1.0)
        plan = SimpleNamespace(
            memory=[SimpleNamespace(at_once=at_once)],
            compared=None,
            schedule=replace(schedules.gpipe(2, 4), cut=cut),
            stages=stages,
            simulate=lambda: SimpleNamespace(latency=1 / size),
        )
        return SimpleNamespace(plan=plan)

    request = Options(schedules.gpipe(2, 4), memory_limit=limit, carry="auto").request
    try:
        return asked, plan_within(make, request).plan.memory[0].at_once.total
    except MemoryLimitError as error:
        return asked, error


def test_what_estimates_miss_is_taken_off_the_limit() -> None:
    asked, found = limits_of(lambda limit: 1.05 * limit, 100)
    assert asked == [100, pytest.approx(100 / 1.05**2)]
    assert found == pytest.approx(1.05 * asked[1])


def test_between_a_plan_and_a_refusal_is_another_limit() -> None:
    asked, found = limits_of(lambda limit: 1.3 * limit if limit > 70 else -50, 100)
    assert asked[:3] == [100, pytest.approx(100 / 1.69), pytest.approx(79.6, abs=0.1)]
    assert found <= 100


def test_the_least_that_is_named_is_planned_for_once() -> None:
    asked, error = limits_of(lambda limit: -150.0, 100)
    assert asked == [100, 150]
    assert isinstance(error, MemoryLimitError)


def test_another_cut_is_looked_for_where_the_one_that_was_found_does_not_do() -> None:
    asked, found = limits_of(lambda limit: 1.05 * limit, 100, cut={"a": 0})
    less = pytest.approx(100 / 1.05**2)
    assert asked == [100, less, less] and found <= 100
