"""What workers hold and send: counted from jobs, from programs' nodes, and on real
state."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import networkx as nx
import pytest
import torch

import fxsched
from fxsched import Plan, Schedule, schedules, simulate
from fxsched.accounts.traffic import traffic
from fxsched.clock.activations import peaks
from fxsched.clock.memory import Memory, worker_totals
from fxsched.ir.graphs import Role
from fxsched.params.optimizers import state_bytes
from tests import mutants, random_plans
from tests.cases import build
from tests.program_memory import most_held
from tests.program_memory import traffic as program_traffic
from tests.simulated import library, stages_of
from tests.updates import OPTIMIZERS

SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "ddp": lambda: schedules.ddp(2, 4),
    "fsdp": lambda: schedules.fsdp(2, 4),
    "1f1b": lambda: schedules.one_f_one_b(2, 4),
    "zero1": lambda: schedules.zero1(2, 4),
    "zero2": lambda: schedules.zero2(2, 4),
    "pipedream": lambda: schedules.pipedream(2, 4),
    "pipedream_2bw": lambda: schedules.pipedream_2bw(2, 4),
    "stale_by_one": lambda: schedules.stale_by_one(2, 4),
    "pipemare": lambda: schedules.pipemare(2, 4),
    "local_sgd": lambda: schedules.local_sgd(2, 1, 4),
}
PLANNED_ON_JOBS = [  # with updates planning counts on the step
    name for name in schedules.LIBRARY if library(name, 2, 8).update_every is None
]
KINDS = ("weights", "versions", "fetched", "gradients")


@cache
def planned(name: str, model: str, updates: bool) -> Plan:
    schedule = SCHEDULES[name]()
    if updates and schedule.update_every is None:
        schedule = replace(schedule, update_every=schedule.microbatches)
    module, inputs = build(model)
    return fxsched.plan(module, schedule, *inputs)


CASES = [
    *((name, model, True) for name in SCHEDULES for model in ("mlp", "gpt")),
    *((name, "mlp", False) for name in ("ddp", "fsdp", "1f1b", "zero1", "zero2")),
]


@pytest.mark.parametrize(("name", "model", "updates"), CASES)
def test_what_programs_hold_is_as_counted(name: str, model: str, updates: bool) -> None:
    check_counted(planned(name, model, updates), every=True)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_plans_are_sound_and_hold_what_is_counted(first: int) -> None:
    """Half of them with updates, every fifth with sums in a fixed order."""
    planned = 0
    for seed in range(first, first + 20):
        case = random_plans.random_case(seed)
        if seed % 2:
            case = random_plans.with_updates(case, seed)
        try:
            plan = fxsched.plan(
                case.model,
                case.schedule,
                *random_plans.batch(case),
                stages=case.stages,
                deterministic=seed % 5 == 0,
            )
        except fxsched.PlanError:  # such as a cap that stops all
            continue
        plan.check()
        check_counted(plan)
        planned += 1
    assert planned > 10


def check_counted(plan: Plan, every: bool = False) -> None:
    """What programs hold is what is predicted.

    every: whether workers read all weights that they keep; no program names others.
    """
    counted = [[getattr(p.each, kind) for kind in KINDS] for p in plan.memory]
    shared = {
        number
        for number, group in enumerate(plan.groups)
        if all(state.role is Role.SHARED for state in group.state)
    }
    moved = [(t.sent, t.received, t.fetches) for t in traffic(plan.step)]
    assert moved == list(map(program_traffic, plan.programs))
    for program, (weights, *others) in zip(plan.programs, counted, strict=True):
        most = most_held(program, shared)
        assert others == [most[kind] for kind in KINDS[1:]]
        assert weights == most["weights"] or (weights > most["weights"] and not every)


@pytest.mark.slow
@pytest.mark.parametrize("case", mutants.cases(), ids=str)
def test_programs_of_all_families_hold_what_is_counted(case: mutants.Case) -> None:
    check_counted(mutants.planned(case)[0], every=True)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_state_of_an_optimizer_is_known_before_its_first_step(
    optimizer: str,
) -> None:
    model, _ = build("mlp")
    made = OPTIMIZERS[optimizer](model)
    parameters = list(model.parameters())
    before = [p.detach().clone() for p in parameters]
    found = state_bytes(made, parameters)
    assert not made.state
    assert all(map(torch.equal, before, parameters))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    made.step()
    assert [found[i] for i in range(len(parameters))] == [
        sum(value.nbytes for value in made.state[p].values() if value is not None)
        for p in parameters
    ]


def test_on_paper_too_a_job_takes_what_its_stage_says() -> None:
    stages = nx.DiGraph([(0, 1)])
    for s in stages:
        stages.nodes[s].update(forward=1.0, backward=2.0, held=10.0, temporary=5.0 + s)
    found = fxsched.simulate(fxsched.schedules.gpipe(2, 4), stages).memory
    assert [(p.at_once.activations, p.at_once.temporary) for p in found] == [
        (40.0, 5.0),
        (40.0, 6.0),
    ]


def test_a_state_that_cannot_be_found_out_is_not_known() -> None:
    class Stubborn(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            raise RuntimeError("not now")

    model, _ = build("mlp")
    parameters = list(model.parameters())
    assert state_bytes(Stubborn(parameters, lr=0.1), parameters) == {}


def test_tables_say_what_workers_hold_where_there_are_updates() -> None:
    plan = planned("pipedream", "mlp", True)
    for text in (str(plan), plan.explain()):
        assert re.search(
            "^worker +weights +versions +gradients +activations +temporary +tog",
            text,
            re.M,
        )
        assert "without the optimizer's state: give the plan optimizer=" in text
    assert "together" not in str(planned("1f1b", "mlp", False))


@pytest.mark.parametrize(("name", "model", "updates"), CASES)
def test_a_page_shows_the_same_memory_and_bytes(
    name: str, model: str, updates: bool
) -> None:
    """The curve of a worker has its peak, and its links all that it sends and gets."""
    plan = planned(name, model, updates)
    details = plan.diagram().details
    assert details is not None
    for (resident, jobs), peak in zip(details.held, plan.memory, strict=True):
        assert max([resident, *(size for _, size in jobs)]) == peak.at_once.total
    for worker, its in enumerate(traffic(plan.step)):
        pairs = details.sent.items()
        assert sum(n for (a, _), n in pairs if a == worker) == its.sent
        assert sum(n for (_, b), n in pairs if b == worker) == its.received


def test_replicas_keep_their_own_gradients() -> None:
    model, inputs = build("mlp")
    plan = fxsched.plan(model, schedules.local_sgd(2, 4), *inputs)
    whole = sum(p.nbytes for p in model.parameters())
    assert [p.each.gradients for p in plan.memory] == [whole, whole]


@pytest.mark.slow
def test_zero_shares_the_state_and_frees_gradients() -> None:
    model, inputs = build("mlp")
    adamw = torch.optim.AdamW(model.parameters())

    def most(schedule: Schedule) -> Memory:
        plan = fxsched.plan(model, schedule, *inputs, optimizer=adamw)
        return max((p.each for p in plan.memory), key=lambda m: m.state)

    ddp, zero1 = most(schedules.ddp(2, 4)), most(schedules.zero1(2, 4))
    assert ddp.state == sum(
        2 * p.nbytes + 4 for p in model.parameters() if p.requires_grad
    )
    assert 0.45 * ddp.state < zero1.state < 0.75 * ddp.state


@pytest.mark.slow
def test_a_limit_is_of_all_kinds() -> None:
    model, inputs = build("gpt")
    adamw = torch.optim.AdamW(model.parameters())
    schedule = schedules.one_f_one_b(2, 4)
    plan = fxsched.plan(model, schedule, *inputs, optimizer=adamw)
    most = max(p.at_once.total for p in plan.memory)
    without = sum(plan.memory[0].at_once[:4]) + plan.memory[0].at_once.activations
    assert without < 0.8 * most
    enough = {"optimizer": adamw, "memory_limit": 1.001 * most}
    fits = fxsched.plan(model, schedule, *inputs, **enough)
    assert max(p.at_once.total for p in fits.memory) <= 1.001 * most
    with pytest.raises(fxsched.PlanError, match=r"\(weights \d+, .*state \d+, temp"):
        fxsched.plan(model, schedule, *inputs, optimizer=adamw, memory_limit=most / 4)


def test_a_simulated_step_says_what_stages_hold() -> None:
    stages = nx.path_graph(2, create_using=nx.DiGraph)
    for number in stages:
        stages.nodes[number].update(weights=20.0, held=3.0, state=40.0)
    held = fxsched.simulate(schedules.one_f_one_b(2, 4), stages).memory
    assert [p.at_once for p in held] == [
        Memory(10.0, 0.0, 0.0, 10.0, 40.0, 6.0),
        Memory(10.0, 0.0, 0.0, 10.0, 40.0, 3.0),
    ]
    stale = fxsched.simulate(schedules.pipedream(2, 4), stages).memory
    assert [p.each.versions for p in stale] == [10.0, 0.0]


@pytest.mark.parametrize("name", PLANNED_ON_JOBS)
def test_what_planning_counts_on_jobs_alone_is_what_the_step_has(name: str) -> None:
    """Activations, and the state of the optimizer."""
    draw = random.Random(name)
    schedule = library(name, draw.randint(2, 4), 8)
    stages: nx.DiGraph[int] = nx.path_graph(stages_of(schedule), nx.DiGraph)
    for s in stages:
        sizes = {key: 8.0 * draw.randint(1, 40) for key in ("held", "weights", "state")}
        stages.nodes[s].update(sizes, forward=1.0, backward=2.0)
    found = simulate(schedule, stages, None)
    fast = worker_totals(found.schedule, found.stages, found.timeline)
    held = [found.stages.nodes[s]["held"] for s, _ in found.timeline.jobs.kinds]
    most = peaks(found.timeline, schedule.release, held)
    for worker, each, saved in zip(found.memory, fast, most, strict=True):
        assert worker.each.activations == saved
        assert worker.each.state == each.state


@pytest.mark.parametrize("every", [1, 2])
def test_averages_in_the_place_of_replicas_take_no_other_weights(every: int) -> None:
    model, inputs = build("mlp")
    schedule = schedules.local_sgd(2, every, 8)
    plan = fxsched.plan(model, schedule, *inputs)
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert {each.at_once.weights for each in plan.memory} == {weights}
    assert max(each.each.versions for each in plan.memory) > 0  # means
