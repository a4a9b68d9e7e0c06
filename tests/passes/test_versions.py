"""Weights of earlier versions: equal to a replay in plain PyTorch, proven before."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch.testing import assert_close

import fxsched
from fxsched import CheckError, Plan, PlanError, Schedule, load_schedule, schedules
from fxsched.ir import ops
from tests.checker.test_check import copied
from tests.fuzz_updates import check
from tests.ranks_versions import SCHEDULES, replayed, rows
from tests.started_ranks import run_ranks
from tests.updates import TOLERANCE, adamw, build_double


@pytest.mark.slow
@pytest.mark.parametrize("order", ["static", "dynamic"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_twenty_updates_equal_their_replay(name: str, order: Any) -> None:
    schedule = SCHEDULES[name]()
    model, inputs = build_double("mlp")
    mine = copy.deepcopy(model)
    backend = fxsched.backend(
        schedule, transport="threads", order=order, optimizer=adamw(mine)
    )
    step = torch.compile(mine, backend=backend)
    batches = rows(inputs, schedule)
    losses = [step(*batch).item() for batch in batches]
    assert backend.plan is not None
    assert_close(losses, replayed(backend.plan, model, batches), **TOLERANCE)
    state, wanted = dict(mine.state_dict()), dict(model.state_dict())
    assert_close(state, wanted, **TOLERANCE)
    backend.close()


@pytest.mark.parametrize("seed", [*range(11), 507])
def test_random_plans_equal_their_replay(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "plans"), [(2, 10), (4, 5)])
def test_ranks_equal_the_replay(ranks: int, plans: int) -> None:
    done = run_ranks(ranks, "tests.ranks_versions")
    assert done.stdout.count("equal to the replay") == ranks * plans, done.stdout


@pytest.mark.parametrize("workers", [4, 8])
def test_the_bubble_of_a_stale_pipeline_is_paid_once_a_call(workers: int) -> None:
    """Filling and draining take (W - 1) (F + B), however many updates come between."""
    for make in (schedules.stale_by_one, schedules.pipedream_2bw, schedules.pipedream):
        ran = fxsched.simulate(make(workers, 64 * workers))
        assert ran.latency == 3 * (64 * workers + workers - 1)
    drained = replace(
        schedules.one_f_one_b(workers, 64 * workers), update_every=workers
    )
    assert fxsched.simulate(drained).latency == 64 * 3 * (2 * workers - 1)


def alive(plan: Plan, worker: int) -> int:
    """The most versions of one group that a program holds at a time."""
    versions, most = {0}, 1
    for node in plan.programs[worker].graph.nodes:
        if node.target is ops.copy:
            versions.add(node)
        elif node.target is ops.free:
            versions -= set(node.all_input_nodes)
        most = max(most, len(versions))
    return most


@pytest.mark.parametrize("name", ["pipedream_2bw", "stale_by_one"])
def test_two_copies_of_the_weights_at_most(name: str) -> None:
    model, inputs = build_double("mlp")
    schedule = schedules.LIBRARY[name](4, 32)
    plan = fxsched.plan(model, schedule, *(torch.cat([x] * 4) for x in inputs))
    assert [alive(plan, worker) for worker in range(4)] == [2, 2, 2, 2]


def test_stashing_keeps_a_version_for_each_microbatch_in_flight() -> None:
    model, inputs = build_double("mlp")
    schedule = schedules.pipedream(4, 8)
    plan = fxsched.plan(model, schedule, *inputs)
    assert [alive(plan, worker) for worker in range(4)] == [4, 3, 2, 1]


def test_an_update_waits_for_the_copy_that_others_are_renewed_from() -> None:
    """Else it may change what is not copied yet, where tasks run as they come."""
    model, inputs = build_double("mlp")
    plan = copied(fxsched.plan(model, SCHEDULES["owners"](), *inputs))
    plan.check()
    updates = calls(plan.programs[0], ops.update)
    update = next(n for n in updates if any("_v1" in str(each) for each in n.args))
    update.args = tuple(each for each in update.args if "_v1" not in str(each))
    with pytest.raises(
        CheckError, match=r"changes weights_\w+ without waiting for copy"
    ):
        plan.check()


def test_others_are_renewed_from_a_copy() -> None:
    """They may read what is sent when the next update goes over it."""
    model, inputs = build_double("mlp")
    plan = copied(fxsched.plan(model, SCHEDULES["owners"](), *inputs))
    sends = calls(plan.programs[0], ops.send)
    send = next(n for n in sends if "_v1" in str(n.args[0]))
    (copied_weights,) = send.all_input_nodes
    send.args = (copied_weights.args[1],)
    with pytest.raises(CheckError, match="may have updated them by then; send"):
        plan.check()


def odd(version: object) -> Schedule:
    return replace(
        schedules.gpipe(2, 4),
        update_every=2,
        version=version,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (lambda s, b, d: 2, r"version\(0F0\) returned 2; return an int from 0 to 0"),
        (lambda s, b, d: -1, r"version\(0F0\) returned -1; return an int from 0"),
        (lambda s, b, d: 0.5, r"version\(0F0\) returned 0\.5; return an int"),
        (lambda s, b, d: [][b], r"version\(0F0\) raised IndexError: .*called with"),
    ],
)
def test_a_version_that_cannot_be_is_an_error(
    version: Callable[..., Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        fxsched.simulate(odd(version))


def test_a_plan_asks_for_no_version_again() -> None:
    asked = []

    def version(s: int, b: int, d: object) -> int:
        asked.append((s, b, d))
        return 0

    model, inputs = build_double("mlp")
    plan = fxsched.plan(model, odd(version), *inputs)
    assert asked
    asked.clear()
    plan.check()
    assert plan.memory and set(plan.versions.values()) == {0}
    assert plan.simulate().memory and not asked


def test_a_version_is_a_function() -> None:
    with pytest.raises(PlanError, match=r"Schedule\(version=3\): give a function"):
        odd(3)


@pytest.mark.slow
def test_a_stale_schedule_is_saved_with_its_versions(tmp_path: Path) -> None:
    schedule = schedules.pipedream_2bw(2, 8)
    schedule.save(tmp_path / "s.json")
    loaded = load_schedule(tmp_path / "s.json")
    plans = [
        fxsched.plan(*build_double("mlp")[:1], each, *build_double("mlp")[1])
        for each in (schedule, loaded)
    ]
    assert plans[0].versions == plans[1].versions
    assert plans[0].jobs == plans[1].jobs


@functools.cache
def late() -> Plan:
    """Two stages, one update late."""
    model, inputs = build_double("mlp")
    return fxsched.plan(model, schedules.stale_by_one(2, 8), *inputs)


def calls(program: fx.GraphModule, target: object) -> list[fx.Node]:
    return program.graph.find_nodes(op="call_function", target=target)


def job(program: fx.GraphModule, name: str) -> fx.Node:
    return next(n for n in program.graph.nodes if n.name == f"job_{name}")


def dropped_early(program: fx.GraphModule) -> None:
    """A copy is freed before its last reader."""
    value = calls(program, ops.copy)[0]
    reader = next(user for user in value.users if user.op == "call_module")
    with program.graph.inserting_before(reader):
        free = program.graph.call_function(ops.free, (value,))
    free.meta.update({k: reader.meta[k] for k in ("worker", "task", "n")}, specs=())


def read_late(program: fx.GraphModule) -> None:
    """A job reads weights of another version than its own."""
    node = job(program, "0B2")
    (weights,) = node.args[0]  # type: ignore[misc, union-attr]
    (newer,) = (n for n in calls(program, ops.update) if n.meta["task"] == "0U1")
    node.replace_input_with(weights, newer)


def read_in_place(program: fx.GraphModule) -> None:
    """A job reads its version where the next update changes it."""
    value = calls(program, ops.copy)[0]
    reader = next(user for user in value.users if user.op == "call_module")
    reader.replace_input_with(value, value.args[1])


def before_its_last_gradient(program: fx.GraphModule) -> None:
    """The sum that an update takes has one gradient twice, another not at all."""
    total = calls(program, ops.update)[0].args[4]
    assert isinstance(total, fx.Node) and total.target is ops.accumulate
    total.args = (total.args[1], total.args[1])


def two_at_once(program: fx.GraphModule) -> None:
    """One update twice."""
    update = calls(program, ops.update)[0]
    with program.graph.inserting_after(update):
        again = program.graph.node_copy(update)
    again.meta = dict(update.meta)
    with program.graph.inserting_after(again):
        free = program.graph.call_function(ops.free, (again,))
    free.meta.update({k: update.meta[k] for k in ("worker", "task", "n")}, specs=())


def before_a_copy(program: fx.GraphModule) -> None:
    """An update doesn't wait for the copy of what it changes."""
    value = calls(program, ops.copy)[0]
    update = next(user for user in value.users if user.target is ops.update)
    update.args = tuple(each for each in update.args if each is not value)


FAULTS = {
    before_a_copy: r"0U\d changes weights_0\w* without waiting for copy 0 v\d",
    dropped_early: "after its free",
    read_late: r"0B2 reads .* version 1 of group 0; it should be version 0",
    read_in_place: r"in a place where an update|after 0U\d changed it",
    before_its_last_gradient: "is missing or counted twice",
    two_at_once: r"updates group 0 once more|after 0U1 changed it",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_finds_what_is_wrong_with_updates(
    fault: Callable[[fx.GraphModule], None],
) -> None:
    plan = copied(late())
    plan.check()
    fault(plan.programs[0])
    with pytest.raises(CheckError, match=FAULTS[fault]):
        plan.check()
