"""PipeMare: rates that begin lower, and B on weights less their velocity."""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.testing import assert_close

import fxsched
from fxsched import CheckError, Plan, PlanError, Schedule, load_schedule, schedules
from fxsched.ir import ops
from tests.checker.test_check import copied
from tests.ranks_versions import replayed, rows
from tests.updates import OPTIMIZERS, TOLERANCE, adamw, batches, build_double


def pipemare(annealed: int = 12, **options: Any) -> Schedule:
    return schedules.pipemare(3, 4, annealed, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_saved_and_loaded_half_way_equals_an_uninterrupted_run(name: str) -> None:
    model, inputs = build_double("mlp")
    wanted, made = copy.deepcopy(model), OPTIMIZERS[name]
    calls = list(batches(inputs, 4))

    def trained(net: nn.Module, state: Any, half: list[Any]) -> tuple[Any, Plan]:
        optimizer = made(net)
        if state is not None:
            optimizer.load_state_dict(state)
        schedule = pipemare()
        with fxsched.backend(
            schedule, transport="threads", optimizer=optimizer
        ) as backend:
            step = torch.compile(net, backend=backend)
            for batch in half:
                step(*batch)
            assert backend.plan is not None
            return copy.deepcopy(optimizer.state_dict()), backend.plan

    first = copy.deepcopy(model)
    state, plan = trained(first, None, calls[:2])
    torch._dynamo.reset()
    second = copy.deepcopy(first)
    trained(second, state, calls[2:])
    fxsched.replay(plan, wanted, made(wanted), calls)
    assert_close(dict(second.state_dict()), dict(wanted.state_dict()), **TOLERANCE)
    assert {each["fxsched_updates"] for each in state["state"].values()} == {8}
    assert any("fxsched_velocity" in each for each in state["state"].values())


def test_a_skipped_update_is_not_counted() -> None:
    model, inputs = build_double("mlp")
    optimizer = adamw(model)
    with fxsched.backend(
        pipemare(), transport="threads", optimizer=optimizer, skip_nonfinite=True
    ) as backend:
        step = torch.compile(model, backend=backend)
        step(inputs[0] * math.inf, *inputs[1:])
        assert not optimizer.state
        step(*inputs)
    counts = {each["fxsched_updates"] for each in optimizer.state.values()}
    assert counts == {4}


@functools.cache
def late() -> Plan:
    model, inputs = build_double("mlp")
    return fxsched.plan(model, pipemare(), *inputs)


@pytest.mark.parametrize("missing", ["rate", "drift"])
def test_each_of_both_corrections_changes_what_is_trained(missing: str) -> None:
    model, inputs = build_double("mlp")
    other = copy.deepcopy(model)
    batch = rows(inputs, late().schedule)[:2]
    without = replace(late(), schedule=replace(late().schedule, **{missing: None}))
    replayed(late(), model, batch)
    replayed(without, other, batch)
    with pytest.raises(AssertionError):
        assert_close(dict(model.state_dict()), dict(other.state_dict()), **TOLERANCE)


def test_no_version_is_stashed() -> None:
    """What F reads is in its place; B of the last stage corrects nothing."""
    targets = [{n.target for n in p.graph.nodes} for p in late().programs]
    assert [ops.correct in each for each in targets] == [True, True, False]
    assert not any(ops.copy in each for each in targets)
    assert "0 v1 corrected here" in late().table(0, width=None)


def test_a_plan_says_what_it_corrects() -> None:
    told = late().explain()
    assert re.search(r"0 +lr / 2 at first, lr from update 12 on +weights - 2 vel", told)
    assert re.search(r"1 +lr +weights - 1 velocity, decay 0\.135\n", told)
    assert re.search(r"2 +lr +weights\n", told)


def corrected(program: fx.GraphModule) -> fx.Node:
    found = program.graph.find_nodes(op="call_function", target=ops.correct)
    return next(node for node in found if node.args[2])  # not of version 0


def reads_what_is_not_corrected(program: fx.GraphModule) -> None:
    value = corrected(program)
    reader = next(user for user in value.users if user.op == "call_module")
    reader.replace_input_with(value, value.args[4])  # type: ignore[arg-type]


def goes_too_far(program: fx.GraphModule) -> None:
    value = corrected(program)
    value.args = (*value.args[:3], 9.0, value.args[4])


def takes_another_velocity(program: fx.GraphModule) -> None:
    value = corrected(program)
    value.args = (*value.args[:2], 0, *value.args[3:])


def reads_another_version(program: fx.GraphModule) -> None:
    first, second = program.graph.find_nodes(op="call_function", target=ops.correct)[:2]
    reader = next(user for user in second.users if user.op == "call_module")
    reader.replace_input_with(second, first)


FAULTS = {
    reads_what_is_not_corrected: r"0B\d reads .* version 1 of group 0; it should be c",
    goes_too_far: r"correct\(0, 1, 9.0, .*; it should be correct\(0, 1, 2.0,",
    takes_another_velocity: r"correct\(0, 0, 2.0, .*; it should be correct\(0, 1, 2.0",
    reads_another_version: r"0B1 reads version 0 of group 0, not 1|after its free",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_finds_what_is_wrong_with_a_correction(
    fault: Callable[[fx.GraphModule], None],
) -> None:
    plan = copied(late())
    plan.check()
    fault(plan.programs[0])
    with pytest.raises(CheckError, match=FAULTS[fault]):
        plan.check()


def test_rates_and_drifts_are_saved(tmp_path: Path) -> None:
    schedule = replace(schedules.pipemare(3, 6), stages=3)
    schedule.save(tmp_path / "s.json")
    loaded = load_schedule(tmp_path / "s.json")
    assert [loaded.stage_rate(s) for s in range(3)] == [(2, 1000), (1, 1000), (1, 1000)]
    assert [loaded.stage_drift(s) for s in range(3)] == [
        (2, pytest.approx(math.exp(-1), abs=1e-3)),
        (1, 0.135),
        None,
    ]


@pytest.mark.parametrize("every", [2, 4])
def test_corrected_weights_are_fetched_as_often_as_simulated(every: int) -> None:
    model, inputs = build_double("mlp")
    schedule = replace(
        schedules.fsdp(2, 4),
        update_every=every,
        drift=lambda s: (2.0, 0.5) if s % 2 else None,
    )
    plan = fxsched.plan(model, schedule, *inputs)
    fetched = [
        len(program.graph.find_nodes(op="call_function", target=ops.fetch))
        for program in plan.programs
    ]
    workers = plan.simulate(prefetch=1).workers
    assert fetched == [worker.weight_fetches for worker in workers]


def test_copies_of_it_keep_their_own_velocities() -> None:
    model, inputs = build_double("mlp")
    schedule = schedules.replicate(schedules.pipemare(2, 4, annealed=5), 2)
    mine, calls = copy.deepcopy(model), list(batches(inputs, 3))
    with fxsched.backend(
        schedule, transport="threads", optimizer=adamw(mine)
    ) as backend:
        step = torch.compile(mine, backend=backend)
        losses = [step(*batch).item() for batch in calls]
        assert backend.plan is not None
        assert_close(losses, replayed(backend.plan, model, calls), **TOLERANCE)
    assert_close(dict(mine.state_dict()), dict(model.state_dict()), **TOLERANCE)


def test_velocities_stay_with_who_updates() -> None:
    model, inputs = build_double("mlp")
    schedule = schedules.replicate(schedules.pipemare(2, 4), 2, zero=1)
    with pytest.raises(PlanError, match=r"drift\(0\): B reads .* leave out u"):
        fxsched.plan(model, schedule, *inputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 2}, r"Schedule\(rate=2\): give a function of the number of a stage"),
        ({"rate": lambda s: 2}, r"rate\(0\) returned 2; return a pair"),
        ({"rate": lambda s: (0, 5)}, r"rate\(0\) returned \(0, 5\); return a delay"),
        ({"rate": lambda s: (2, 0)}, r"rate\(0\) returned \(2, 0\); .*1 or more"),
        ({"drift": lambda s: (2, 1)}, r"drift\(0\) returned \(2, 1\); .*between 0"),
        ({"drift": lambda s: [][s]}, r"drift\(0\) raised IndexError"),
        ({"drift": lambda s: None, "update_every": None}, r"Schedule\(drift=\) is"),
    ],
)
def test_what_they_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        schedule = replace(schedules.gpipe(2, 4), **{"update_every": 2} | options)
        schedule.stage_rate(0)
        schedule.stage_drift(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 3}, r"every=3, microbatches=\d+\): give microbatches="),
        ({"correction": 1.0}, r"correction=1\.0.: give a number between 0 and 1"),
        ({"annealed": 0}, "annealed=0"),
    ],
)
def test_what_pipemare_takes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        pipemare(**options)


class Quadratic(nn.Module):
    """Adds w^2 / 2 to a sum, as h^2 - w^2 / 2 of the activation h = w, so that the
    gradient is 2 u - v, where F read u and B reads v: sensitivity 1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, one: Tensor, total: Tensor) -> Tensor:
        h = self.w * one
        added: Tensor = total + h * h - self.w * self.w / 2
        return added


class Quadratics(nn.Module):
    def __init__(self, stages: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Quadratic() for _ in range(stages))

    def forward(self, one: Tensor) -> Tensor:
        total = torch.zeros_like(one)
        for stage in self.stages:
            total = stage(one, total)
        return total.mean()


class Recorded(torch.optim.SGD):
    """Notes what its steps make of each parameter."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__(model.parameters(), lr=lr)
        self.past: dict[Tensor, list[float]] = {p: [] for p in model.parameters()}

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.past[parameter].append(parameter.item())


def growth(values: list[float]) -> float:
    """The factor per update in the long run: between the largest of two windows."""
    window, half = 30, len(values) // 2
    first, last = (max(map(abs, values[i:][:window])) for i in (half, -window))
    return float((last / first) ** (1 / (len(values) - window - half)))


@pytest.mark.slow
@pytest.mark.parametrize(("lr", "exponent"), [(0.1, 1), (0.5, 0)])
def test_a_quadratic_converges_as_stability_says(lr: float, exponent: int) -> None:
    workers, updates = 4, 160
    model = Quadratics(workers)
    annealed = 10**9 if exponent else 1
    schedule = schedules.pipemare(workers, updates, annealed)
    optimizer = Recorded(model, lr)
    with fxsched.backend(schedule, transport="threads", optimizer=optimizer) as backend:
        torch.compile(model, backend=backend)(torch.ones(updates, dtype=torch.float64))
    for stage, values in enumerate(optimizer.past.values()):
        record = fxsched.stability(
            "pipemare", workers - 1 - stage, exponent=exponent, lr_lambda=[lr]
        )
        factor = growth(values)
        assert factor == pytest.approx(record.radius[0], rel=0.005)
        assert record.bound is not None and (factor < 1) == (lr < record.bound)
