"""Updates in order of arrival: equal to a replay of that order, bounded, proven."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch.testing import assert_close

import fxsched
from fxsched import (
    CheckError,
    Direction,
    Job,
    Placement,
    Plan,
    PlanError,
    Schedule,
    load_schedule,
    schedules,
)
from fxsched.ir import ops
from fxsched.ir.request import Order
from fxsched.passes.users import Pass
from tests import fuzz_arrivals
from tests.arrivals import check, whole
from tests.checker.test_check import copied
from tests.fuzz_arrivals import ROUNDS, TRAINERS
from tests.started_ranks import run_ranks
from tests.updates import TOLERANCE, adamw, build_double, eager


def server(
    staleness: int | None = None, servers: int = 1, microbatches: int = 6
) -> Schedule:
    return schedules.parameter_server(
        3 + servers, microbatches, servers, asynchronous=True, staleness=staleness
    )


def pipelined() -> Schedule:
    """Two pipelines of two workers that share their weights, B split, a cap."""
    return Schedule(
        4,
        6,
        stages=2,
        w=lambda s, b, d: Placement(s, 2 * (b % 2) + s),
        in_flight=1,
        split_backward=True,
        update_every=1,
        version=lambda s, b, d: max(0, b - 1),
        ahead=1,
    )


def trainers_serve() -> Schedule:
    """As fsdp: each worker keeps some stages, and trains."""
    schedule = schedules.fsdp(2, 6)
    return replace(
        schedule, update_every=1, version=lambda s, b, d: max(0, b - 1), ahead=inf
    )


PARTED = ["layers.2", "layers.4"]  # three stages

CASES: dict[str, tuple[Schedule, str, Order, dict[str, Any]]] = {
    "asynchronous": (server(), "mlp", "dynamic", {"stages": PARTED}),
    "two servers": (
        server(1, 2),
        "mlp",
        "dynamic",
        {"stages": PARTED, "clip_grad_norm": 0.1},
    ),
    "tied": (server(2), "gpt", "dynamic", {"stages": ["blocks.1"]}),
    "planned": (server(), "mlp", "static", {"stages": PARTED}),
    "pipelined": (pipelined(), "mlp", "dynamic", {"carry": "recompute"}),
    "trainers serve": (
        trainers_serve(),
        "mlp",
        "dynamic",
        {"stages": PARTED, "prefetch": 2},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_twenty_updates_equal_the_replay(case: str) -> None:
    schedule, name, order, options = CASES[case]
    check(schedule, name, order=order, **options)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 23])  # 23: tied weights, no prefetch
def test_random_plans_equal_the_replay(seed: int) -> None:
    fuzz_arrivals.check_plan(seed)


@pytest.mark.slow
def test_servers_on_ranks_equal_the_replay() -> None:
    done = run_ranks(4, "tests.ranks_arrivals")
    assert done.stdout.count("equal to the replay") == 2 * 4, done.stdout


@pytest.mark.parametrize("order", ["static", "dynamic"])
def test_no_staleness_is_synchronous(order: Order) -> None:
    model, _ = build_double("mlp")
    mine, inputs = copy.deepcopy(model), whole("mlp", 6)
    schedule = server(0)
    backend = fxsched.backend(schedule, PARTED, "threads", order, optimizer=adamw(mine))
    step = torch.compile(mine, backend=backend)
    losses = [step(*(x.roll(i, 0) for x in inputs)).item() for i in range(5)]
    wanted, reference = eager(model, adamw, inputs, 3, 6)
    assert_close(losses, wanted, **TOLERANCE)
    assert_close(dict(mine.state_dict()), dict(reference.state_dict()), **TOLERANCE)
    with pytest.raises(PlanError, match="there are no arrivals: updates are in the"):
        _ = backend.arrivals
    backend.close()


@pytest.mark.slow
def test_no_worker_is_further_ahead_than_it_may_with_random_delays() -> None:
    assert max(fuzz_arrivals.check(1, 6, "threads")) <= 1


def held_back(rounds: int) -> Pass:
    """Worker 0 does not go on until the others have run B of so many rounds more."""
    others = range(TRAINERS * rounds + 1, TRAINERS * (rounds + 1))
    left = {f"0B{b}" for b in others}
    reached = threading.Event()

    def after(value: object, job: str, worker: int) -> None:
        if worker == 0:
            assert reached.wait(60), "the others wait too"
        left.discard(job)
        if not left:
            reached.set()

    def hold(program: fx.GraphModule, request: object) -> fx.GraphModule:
        for node in list(program.graph.nodes):
            if node.op == "call_module":
                args = (node, str(node.meta["job"]), node.meta["worker"])
                with program.graph.inserting_after(node):
                    program.graph.call_function(after, args)
        return program

    return hold


@pytest.mark.parametrize("staleness", [1, 3])
def test_workers_go_ahead_as_far_as_they_may(staleness: int) -> None:
    slows = held_back(staleness)
    assert fuzz_arrivals.check(staleness, 1, "threads", slows) == [staleness]


def test_without_a_bound_the_same_delay_puts_workers_further_ahead() -> None:
    slows = held_back(ROUNDS - 1)
    (lead,) = fuzz_arrivals.check(None, 1, "threads", slows)
    assert lead >= ROUNDS - 1 > 3


@functools.cache
def planned() -> Plan:
    model, _ = build_double("mlp")
    stages = ["layers.3"]
    inputs = whole("mlp", 6)
    return fxsched.plan(model, server(1), *inputs, stages=stages, order="dynamic")


def calls(program: fx.GraphModule, target: object) -> list[fx.Node]:
    return program.graph.find_nodes(op="call_function", target=target)


def named(program: fx.GraphModule, name: str) -> fx.Node:
    return next(node for node in program.graph.nodes if node.name == name)


def reads_too_early(program: fx.GraphModule) -> None:
    """The copy for 0F3 does not wait for its trainer's 0U0."""
    copy = named(program, "weights_0_of_3")
    copy.args = copy.args[:2]


def goes_too_far_ahead(program: fx.GraphModule) -> None:
    """0U3 waits for its worker's 0U0 alone, and not for 0U1 and 0U2."""
    update = named(program, "weights_0_0U3")
    update.args = update.args[:7]


def twice(program: fx.GraphModule) -> None:
    update = named(program, "weights_0_0U0")
    with program.graph.inserting_after(update):
        again = program.graph.node_copy(update)
    again.meta = dict(update.meta)
    with program.graph.inserting_after(again):
        free = program.graph.call_function(ops.free, (again,))
    free.meta.update({k: update.meta[k] for k in ("worker", "task", "n")}, specs=())


def sends_what_changes(program: fx.GraphModule) -> None:
    """A trainer gets the weights themselves, and not the copy of them."""
    copy = named(program, "weights_0_of_0")
    send = next(user for user in copy.users if user.target is ops.send)
    send.replace_input_with(copy, copy.args[1])


def sends_the_others(program: fx.GraphModule) -> None:
    """B of a microbatch gets the copy of another."""
    own, other = (named(program, f"weights_0_of_{b}") for b in (0, 1))
    send = [user for user in own.users if user.target is ops.send][-1]
    send.replace_input_with(own, other)


def another_gradient(program: fx.GraphModule) -> None:
    """0U0 takes the gradient of 0B1."""
    updates = [named(program, f"weights_0_0U{b}") for b in (0, 1)]
    totals = [update.args[4] for update in updates]
    recvs = [total.args[1] for total in totals]  # type: ignore[union-attr]
    totals[0].replace_input_with(*recvs)  # type: ignore[union-attr, arg-type]


def not_noted(program: fx.GraphModule) -> None:
    program.graph.erase_node(named(program, "note_0U0"))


def in_a_version(program: fx.GraphModule) -> None:
    """An update of what another update made, as in the planned order."""
    first, later = (named(program, f"weights_0_0U{b}") for b in (0, 3))
    later.args = (*later.args[:3], first, *later.args[4:])


FAULTS = {
    reads_too_early: "0F3 does not wait for 0U0",
    goes_too_far_ahead: "0U3 does not wait for 0U1",
    twice: "0U0 updates group 0 once more than it should",
    sends_what_changes: "0F0 reads fetch_0, which is group 0 where updates change it;",
    sends_the_others: "0B0 reads fetch_6, which is the copy of group 0 for",
    another_gradient: r"reduce 0 of round 1 reads recv_22 after reduce 0 of round 0",
    not_noted: "0U0 is not noted",
    in_a_version: "0U3 takes weights_0_0U0, which is 0U0; it should be group 0",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_finds_what_is_wrong(fault: Callable[[fx.GraphModule], None]) -> None:
    plan = copied(planned())
    plan.check()
    fault(plan.programs[3])
    with pytest.raises(CheckError, match=FAULTS[fault]):
        plan.check()


def test_tables_say_that_updates_are_in_order_of_arrival() -> None:
    plan = planned()
    said = (
        "updates of each microbatch, in order of arrival, no worker more than 1 ahead"
    )
    assert said in plan.text()
    assert repr(plan).endswith("updates in order of arrival>")
    assert "under order='dynamic' in order of arrival" in plan.explain()
    table = plan.table(3, width=None)
    assert "0 as read 0F3" in table and "0U0 here" in table


def test_saved_with_its_bound(tmp_path: Path) -> None:
    for schedule in (server(2), server()):
        saved = tmp_path / "s.json"
        replace(schedule, stages=2).save(saved)
        loaded = load_schedule(saved)
        assert loaded.ahead == schedule.ahead
        assert [loaded.seen(Job(0, b, Direction.BACKWARD)) for b in range(6)] == [
            *(0, 0, 0, 1, 2, 3)
        ]
    assert server(2, 1, 6).first(3).ahead == 2


def late(schedule: Schedule, **fields: Any) -> Schedule:
    version = fields.pop("version", lambda s, b, d: 0)
    return replace(schedule, update_every=1, version=version, ahead=1, **fields)


def only_forward(s: int, b: int, d: Direction) -> int:
    return 0 if d is Direction.FORWARD else b


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a bound that is none": (
        lambda: replace(server(), ahead=-1),
        r"Schedule\(ahead=-1\): give an int of 0 or more, or math.inf",
    ),
    "several microbatches": (
        lambda: replace(server(), update_every=2),
        r"Schedule\(ahead=inf, update_every=2\): in order of arrival an update is of",
    ),
    "a staleness alone": (
        lambda: schedules.parameter_server(4, 6, staleness=1),
        r"parameter_server\(staleness=1\): give asynchronous=True too, because",
    ),
    "a staleness that is none": (
        lambda: schedules.sharded_parameter_server(
            4, 6, asynchronous=True, staleness=-1
        ),
        r"sharded_parameter_server\(staleness=-1\): give an int of 0 or more, or None",
    ),
    "corrections": (
        lambda: replace(server(), rate=lambda s: (2.0, 10)),
        r"Schedule\(ahead=inf\) doesn't go with rate=, drift= or average_",
    ),
    "copies": (
        lambda: schedules.replicate(server(), 2),
        "replicate: parameter_server updates in order of arrival .ahead=inf., and",
    ),
    "several keepers": (
        lambda: plan_of(late(schedules.ddp(2, 6))),
        r"stage 0 has its weights on workers \[0, 1\], and each would see updates in",
    ),
    "newer weights for B": (
        lambda: plan_of(late(schedules.fsdp(2, 6), version=only_forward)),
        r"1F1 has seen 0 updates and 1B1 1; where updates are in order of arrival",
    ),
    "microbatches not in turns": (
        lambda: plan_of(
            late(schedules.fsdp(2, 6), w=lambda s, b, d: Placement(0, b // 3))
        ),
        r"1U1 may be 1 updates ahead and waits for 1U3, which is planned after it;",
    ),
}


def plan_of(schedule: Schedule) -> Plan:
    model, _ = build_double("mlp")
    return fxsched.plan(
        model, schedule, *whole("mlp", 6), stages=["layers.3"], order="dynamic"
    )


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_an_error(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(PlanError, match=message):
        make()


def test_a_replay_takes_whole_orders_of_its_plan() -> None:
    model, _ = build_double("mlp")
    plan, batch = planned(), whole("mlp", 6)
    jobs = [Job(s, b, d) for b in range(6) for d in ("F", "U") for s in (0, 1)]
    order = [Job(s, b, Direction(d)) for s, b, d in jobs]

    def replayed(plan: Plan, arrivals: list[list[Job]]) -> list[float]:
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        return fxsched.replay(plan, model, sgd, [batch], arrivals=arrivals)

    replayed(plan, [order])
    with pytest.raises(PlanError, match="arrivals should have 1U5 once"):
        replayed(plan, [order[:-1]])
    with pytest.raises(PlanError, match="arrivals have 0U5 before the jobs whose"):
        replayed(plan, [order[::-1]])
    with pytest.raises(PlanError, match="1 batches and arrivals of 2 calls"):
        replayed(plan, [order, order])
    with pytest.raises(PlanError, match="the plan's updates are in the planned order"):
        replayed(replace(plan, by_arrival=False), [order])
