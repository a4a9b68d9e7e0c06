"""Replicas that take steps of their own and are averaged: equal to a replay in plain
PyTorch, proven before."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch.testing import assert_close

import fxsched
from fxsched import (
    CheckError,
    Placement,
    Plan,
    PlanError,
    Schedule,
    load_schedule,
    schedules,
)
from fxsched.ir import ops
from fxsched.passes.step.frees import free_values
from tests.checker.test_check import copied
from tests.ranks_averages import SCHEDULES, check, plain
from tests.started_ranks import run_ranks
from tests.updates import TOLERANCE, adamw, batches, build_double, eager, momentum
from tests.zero import even


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_twenty_updates_equal_their_replay(name: str) -> None:
    make, made = SCHEDULES[name]
    check(make(), made, "threads", "dynamic" if "pipelines" in name else "static")


@pytest.mark.slow
def test_ranks_equal_the_replay() -> None:
    done = run_ranks(2, "tests.ranks_averages")
    assert done.stdout.count("equal to the replay") == 2 * 5, done.stdout


@pytest.mark.slow
def test_an_average_after_each_plain_step_is_that_of_gradients() -> None:
    """From equal weights, the mean of W steps is the step of the mean gradient."""
    model, inputs = build_double("mlp")
    mine = copy.deepcopy(model)
    schedule = schedules.local_sgd(2, 1, 4)
    backend = fxsched.backend(schedule, transport="threads", optimizer=plain(mine))
    step = torch.compile(mine, backend=backend)
    losses = [step(*batch).item() for batch in batches(inputs)]
    wanted, other = eager(model, plain, inputs, every=2, microbatches=4)
    assert_close(losses, wanted, **TOLERANCE)
    assert_close(dict(mine.state_dict()), dict(other.state_dict()), **TOLERANCE)
    with torch.no_grad():
        assert_close(step(*inputs), other(*inputs), **TOLERANCE)
    backend.close()


def drawn(seed: int) -> Schedule:
    """Copies of a pipeline with its stages on any workers, in any order."""
    draw = random.Random(seed)
    workers, every, average = draw.randint(1, 2), draw.randint(1, 2), draw.randint(1, 2)
    places = [draw.randrange(workers) for _ in range(3)]
    order = [[draw.randrange(50) for _ in range(8)] for _ in range(3)]
    microbatches = every * average * draw.randint(1, 2)
    inside = Schedule(
        workers,
        microbatches,
        stages=3,
        w=lambda s, b, d: Placement(places[s], places[s]),
        n=lambda s, b, d: order[s][b],
        update_every=every,
    )
    copies = schedules.replicate(inside, draw.randint(2, 3))
    elastic = draw.choice((None, 0.25))
    return replace(copies, average_every=average, elastic=elastic)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_copies_of_a_pipeline_equal_their_replay(seed: int) -> None:
    check(drawn(seed), (adamw, momentum)[seed % 2], "threads")


@pytest.mark.slow
@pytest.mark.parametrize("elastic", [None, 0.5])
def test_what_is_received_is_as_simulated(elastic: float | None) -> None:
    model, x = even()
    schedule = schedules.local_sgd(4, 1, 8, elastic)
    plan = fxsched.plan(model, schedule, x)
    received = [
        sum(
            spec.bytes
            for node in program.graph.find_nodes(op="call_function", target=ops.recv)
            if "average" in node.meta["task"] or "U" in node.meta["task"]
            for spec in node.meta["specs"]
        )
        for program in plan.programs
    ]
    workers = plan.simulate().workers
    assert sum(received) == sum(w.parameter_bytes or 0 for w in workers) > 0
    assert [w.weights_renewed for w in workers] == [12] * 4
    ddp = fxsched.plan(model, replace(schedules.ddp(4, 8), update_every=4), x)
    others = [w.parameter_bytes or 0 for w in ddp.simulate().workers]
    assert sum(received) == sum(others)


def test_replicas_do_not_wait_for_each_other_between_averages() -> None:
    """A worker that is slow in its first round costs the others nothing before then."""

    def seconds(job: fxsched.Job) -> float:
        if job.direction == "U":
            return 0.0
        return 5.0 if job.microbatch in (0, 3) else 1.0  # one on each worker

    waits = replace(schedules.ddp(2, 4), update_every=2)
    alone = schedules.local_sgd(2, 2, 4)
    took = [fxsched.simulate(each, 1, seconds).latency for each in (waits, alone)]
    assert took == [20.0, 12.0]


def test_a_schedule_is_saved_with_its_averages(tmp_path: Path) -> None:
    outer = replace(schedules.local_sgd(2, 2, 8, outer=(0.7, 0.9)), stages=2)
    outer.save(tmp_path / "s.json")
    assert load_schedule(tmp_path / "s.json").outer == outer.outer == (0.7, 0.9)
    schedule = replace(schedules.local_sgd(2, 2, 8, 0.5), stages=2)
    schedule.save(tmp_path / "s.json")
    loaded = load_schedule(tmp_path / "s.json")
    assert (loaded.average_every, loaded.elastic) == (2, 0.5)
    copies = schedules.replicate(schedule, 2)
    assert (copies.update_every, copies.average_every) == (4, 2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"average_every": 3}, r"average_every=3\): give None, or an int .* 4 updates"),
        ({"average_every": 0}, r"average_every=0\): give None"),
        ({"update_every": None}, r"average_every=2\): give None, .* the 0 updates"),
        ({"average_every": None, "elastic": 0.5}, r"elastic=0\.5\): it says how"),
        ({"average_every": None, "outer": (1, 0)}, r"outer=\(1, 0\)\): it says how"),
        ({"outer": 0.7}, r"outer=0\.7\): give None, or a pair \(lr, momentum\), lr ab"),
        ({"outer": (0, 0.9)}, r"outer=\(0, 0\.9\)\): give None, or a pair"),
        ({"outer": (0.7, 1)}, r"momentum from 0 and below 1$"),
        (
            {"outer": (1, 0), "elastic": 0.5},
            r"outer=\(1, 0\)\): each says .* leave one",
        ),
        ({"elastic": 1.5}, r"elastic=1\.5\): give None, or a number above 0"),
        ({"u": lambda s, b: 0}, r"average_every=2\): each replica .* leave u= out"),
        ({"version": lambda s, b, d: 0}, r"leave version= out"),
        ({"rate": lambda s: None}, r"leave rate= out"),
    ],
)
def test_what_averages_do_not_go_with_is_an_error(
    wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        replace(schedules.local_sgd(2, 2, 8), **wrong)


@pytest.mark.parametrize(
    "wrong", [{"outer": 0.7}, {"elastic": 2}, {"outer": (0.7, 0.9), "elastic": 0.5}]
)
def test_errors_about_averages_name_the_call(wrong: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"^local_sgd\((outer|elastic)="):
        schedules.local_sgd(2, 2, **wrong)


def uneven(s: int, b: int, d: object) -> Placement:
    return Placement(b % 3 % 2, b % 3 % 2)


def apart(s: int, b: int, d: object) -> Placement:
    return Placement(b % 2, (b + 1) % 2)


@pytest.mark.parametrize(
    ("w", "message"),
    [
        (uneven, r"worker 0 keeps stage 0 and runs 2 of microbatches 2\.\.3, wh"),
        (apart, r"0F0 and the other jobs of its .* on workers \[0, 1\], but one"),
    ],
)
def test_jobs_that_make_no_replicas_are_an_error(
    w: Callable[..., Placement], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        fxsched.simulate(replace(schedules.local_sgd(2, 2, 8), w=w), 1)


def test_norms_of_all_gradients_are_refused() -> None:
    model, inputs = build_double("mlp")
    backend = fxsched.backend(
        schedules.local_sgd(2, 2), optimizer=adamw(model), clip_grad_norm=1.0
    )
    with pytest.raises(Exception, match=r"with average_every each replica has its own"):
        torch.compile(model, backend=backend)(*inputs)


def test_a_weighted_loss_is_refused() -> None:
    """Its weights are of the whole batch, and a replica has a part."""
    model, _ = build_double("mlp")
    with pytest.raises(PlanError, match=r"sees only its own"):
        fxsched.backend(
            schedules.local_sgd(2, 1),
            optimizer=adamw(model),
            loss_reduction="weighted",
        )


@functools.cache
def planned(
    elastic: float | None = None, outer: tuple[float, float] | None = None
) -> Plan:
    model, inputs = build_double("mlp")
    schedule = replace(schedules.local_sgd(2, 2, 8, elastic, outer), stages=2)
    return fxsched.plan(model, schedule, *inputs)


def test_a_plan_says_that_it_averages() -> None:
    assert "replicas averaged every 2 updates, elastic by 0.5" in str(planned(0.5))
    stepped = "averaged every 2 updates, with an outer step of lr 0.7, momentum 0.9"
    assert stepped in str(planned(outer=(0.7, 0.9)))


def test_an_outer_step_sends_as_much_as_an_average_and_keeps_a_momentum() -> None:
    plain, outer = planned(), planned(outer=(0.7, 0.9))
    sent = [
        sum(w.parameter_bytes or 0 for w in plan.simulate().workers)
        for plan in (plain, outer)
    ]
    assert sent[0] == sent[1] > 0
    model, _ = build_double("mlp")
    momentum = sum(parameter.nbytes for parameter in model.parameters())
    for plan, bytes_more in ((plain, 0), (outer, momentum)):
        assert [peaks.each.state for peaks in plan.memory] == [bytes_more] * 2


def calls(program: fx.GraphModule, target: object) -> list[fx.Node]:
    return program.graph.find_nodes(op="call_function", target=target)


def without_frees(plan: Plan) -> Plan:
    """A copy of a plan to plant a fault in."""
    plan = copied(plan)
    for program in plan.programs:
        for node in calls(program, ops.free):
            program.graph.erase_node(node)
    return plan


def check_freed(plan: Plan) -> None:
    """Checks it with its values freed after their last readers, whoever these are."""
    for program in plan.programs:
        free_values(program.graph)
    plan.check()


def one_twice(plan: Plan) -> None:
    """An average has one replica twice, the other not at all."""
    node = calls(plan.programs[0], ops.average)[0]
    node.args = (*node.args[:2], node.args[2], node.args[2])


def another_version(plan: Plan) -> None:
    """An average takes a replica after another update."""
    first, later = calls(plan.programs[0], ops.replica)[::2][:2]
    later.replace_all_uses_with(first)


def reads_its_own(plan: Plan) -> None:
    """A job reads the replica of its worker, where there is an average."""
    taken = calls(plan.programs[0], ops.take)[0]
    reader = next(u for u in taken.users if u.op == "call_module")
    own = taken.args[3]
    assert isinstance(own, fx.Node)
    reader.replace_input_with(taken, own)


def reads_before(plan: Plan) -> None:
    """The same, before the average comes."""
    program = plan.programs[0]
    taken = calls(program, ops.take)[0]
    reads_its_own(plan)
    reader = next(n for n in program.graph.nodes if n.name == "job_1F4")
    reader.append(taken)


def updates_its_own(plan: Plan) -> None:
    """An update goes on from the replica of its worker, not from the average."""
    taken = calls(plan.programs[1], ops.take)[0]
    reader = next(u for u in taken.users if u.target is ops.update)
    own = taken.args[3]
    assert isinstance(own, fx.Node)
    reader.replace_input_with(taken, own)


def not_taken(plan: Plan) -> None:
    """The last average is not put in a worker's place."""
    program = plan.programs[1]
    program.graph.erase_node(calls(program, ops.take)[-1])


def gradient_of_another(plan: Plan) -> None:
    """An update takes the gradient of another round."""
    first, later = calls(plan.programs[0], ops.update)[::2][:2]
    later.replace_input_with(later.args[4], first.args[4])  # type: ignore[arg-type]


FAULTS = {
    one_twice: r"take 0 after 0U3 takes average\(.*; it should be average\(",
    another_version: r"1U7 reads own_weights_1_1U3 after take 1 after 1U3 changed it",
    reads_its_own: r"1F4 reads \w+ after take 1 after 1U3 changed it",
    updates_its_own: r"1U5 reads \w+ after take 1 after 1U3 changed it",
    reads_before: r"1F4 reads .*; it should be the average of group 1 after 2 updates",
    not_taken: r"the step leaves .*; it should be the average of group 0 af",
    gradient_of_another: r"is missing or counted twice",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_finds_what_is_wrong_with_averages(fault: Callable[[Plan], None]) -> None:
    plan = without_frees(planned())
    fault(plan)
    with pytest.raises(CheckError, match=FAULTS[fault]):
        check_freed(plan)


def test_finds_another_centre() -> None:
    plan = without_frees(planned(0.5))
    later = calls(plan.programs[0], ops.average)[-1]
    start = next(n for n in calls(plan.programs[0], ops.replica) if n.args[3])
    later.args = (later.args[0], start, *later.args[2:])
    with pytest.raises(
        CheckError,
        match=r"takes average\(0.5, replica\(1, .*; it should be average\(0.5, average",
    ):
        check_freed(plan)


def test_finds_an_outer_step_from_another_centre_or_of_another_rate() -> None:
    for position, wrong in ((2, (0.7, 0.8)), (5, None)):
        plan = without_frees(planned(outer=(0.7, 0.9)))
        first, *_, later = calls(plan.programs[0], ops.take)
        later.update_arg(position, wrong or first.args[5])
        with pytest.raises(CheckError, match=r"take . after .U7 takes .* should be"):
            check_freed(plan)


def test_finds_nothing_in_a_plan_that_is_as_it_was() -> None:
    for each in (planned(), planned(0.5), planned(outer=(0.7, 0.9))):
        check_freed(without_frees(each))
