"""Programs and tables of one two-tower model, compared with golden text.

`pytest tests/passes/test_passes.py --update-golden` writes the files anew.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxsched
from fxsched import Direction, Placement, Plan, Schedule, pipeline, schedules
from fxsched.ir.graphs import Role
from fxsched.ir.step import Step
from fxsched.partition.costs import Work
from fxsched.passes.split import _modules
from tests.text import graph_text

Golden = Callable[[str, str], None]


class TwoTower(nn.Module):
    """Two encoders and a head that compares what they say."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        self.doc = nn.Sequential(nn.Linear(5, 4), nn.ReLU())
        self.head = nn.Linear(4, 1)

    def forward(self, code: Tensor, doc: Tensor) -> Tensor:
        return self.head(self.code(code) * self.doc(doc)).pow(2).mean()


def test_a_stage_is_named_by_modules_with_weights_or_work_in_it() -> None:
    graph = fx.Graph()

    def node(module: str, seconds: float, *read: fx.Node) -> fx.Node:
        made = graph.call_function(torch.relu, read)
        made.meta.update(module=module, work=Work(0, seconds, seconds, 0))
        return made

    weight = graph.placeholder("weight")
    weight.meta["role"] = Role.PARAMETER
    whole, cheap = node("a", 1.0), node("b", 0.001)
    read, much, none = node("c.d", 0.0, weight), node("e", 0.1), node("", 9.0)
    inside = [whole, cheap, read, much, none]
    everywhere = Counter({"a": 1, "b": 2, "c": 5, "c.d": 2, "e": 2})
    assert _modules(inside[:4], everywhere) == ["a", "c.d (part)", "e (part)"]
    assert _modules(inside, everywhere) == ["a", "c.d (part)"]
    assert _modules([cheap], everywhere) == ["b (part)"]


def shifted() -> Schedule:
    """Stage s is kept by worker s mod 2 and run by worker s + b mod 2: what a plan can
    hold, all at once: activations and weights that move, reduced gradients, a cap."""

    def n(s: int, b: int, d: Direction) -> int:
        return 6 * b + (s if d is Direction.FORWARD else 5 - s)

    return Schedule(
        workers=2,
        microbatches=2,
        stages=3,
        w=lambda s, b, d: Placement(weights=s % 2, compute=(s + b) % 2),
        n=n,
        in_flight=1,
        name="shifted",
    )


SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "shifted": shifted,
    "1f1b": lambda: schedules.one_f_one_b(2, 2),
    "zb_h1": lambda: schedules.zb_h1(2, 2),
}


def make(schedule: Schedule, **options: Any) -> Plan:
    return fxsched.plan(
        TwoTower(), schedule, torch.ones(4, 3), torch.ones(4, 5), **options
    )


@functools.cache
def plan_of(schedule: str) -> Plan:
    return make(SCHEDULES[schedule]())


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_program_of(schedule: str, rank: int, golden: Golden) -> None:
    golden(f"program_{schedule}_{rank}", graph_text(plan_of(schedule).programs[rank]))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tables_of(schedule: str, golden: Golden) -> None:
    golden(f"tables_{schedule}", plan_of(schedule).text())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_plans_of_equal_requests_are_equal_text(schedule: str) -> None:
    again = make(SCHEDULES[schedule]())
    texts = [
        [plan.text(), *map(graph_text, plan.programs)]
        for plan in (plan_of(schedule), again)
    ]
    assert texts[0] == texts[1]


def test_a_program_is_written_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[int] = []
    table = plan_of("shifted").table(1)
    cut_program = pipeline.cut_program

    def cut(step: Step, request: Any, worker: int) -> fx.Graph:
        written.append(worker)
        return cut_program(step, request, worker)

    monkeypatch.setattr(pipeline, "cut_program", cut)
    plan = make(shifted())
    assert plan.digest == plan_of("shifted").digest != plan_of("1f1b").digest
    assert len(plan.programs) == 2 and not written
    assert plan.table(1) == table
    assert plan.programs[-1] is plan.programs[1]
    assert written == [1]
    assert len(plan.programs[:]) == len(list(plan.programs)) == 2
    assert written == [1, 0]


def test_a_plan_for_no_grad_has_forward_jobs_only() -> None:
    with torch.no_grad():
        plan = make(shifted())
    assert sorted(map(str, plan.jobs)) == [
        f"{s}F{b}" for s in range(3) for b in range(2)
    ]


def test_recompute_saves_nothing() -> None:
    plan = make(shifted(), carry="recompute")
    names = [node.name for program in plan.programs for node in program.graph.nodes]
    assert not [name for name in names if name.startswith("saved")]
