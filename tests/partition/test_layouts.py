"""The search over cuts and placements, and the annealing that it is measured by."""

from __future__ import annotations

from math import inf
from random import Random

import networkx as nx
import pytest

from fxsched import Plan, PlanError, Schedule, plan, schedules, simulate
from fxsched.clock.stage_graph import run_stages, step_seconds
from fxsched.jobs.job import Direction, Job
from fxsched.partition.cut_cost import Hyperedge, Problem, Unit
from fxsched.partition.layouts import Layout, Layouts, Place
from fxsched.partition.planner import most_held
from fxsched.schedules.graph_schedule import longest_way_first
from fxsched.schedules.orders import oldest_microbatch_first

from ..annealing import State, anneal, order, step
from ..bench.auto import blocks_of, planned
from ..cases import gpt, mlp, two_tower

F, B, *_ = Direction


def branches(random: Random, count: int = 12) -> Problem:
    """Units of random work, each of which reads one or two of those before it."""
    units, edges = [], []
    for u in range(count):
        f, back = random.uniform(1, 4), random.uniform(1, 4)
        units.append(Unit(f, f + back, held=random.uniform(1, 9), weights=2, fetch=0.3))
        before = random.sample(range(max(0, u - 4), u), min(u, random.choice((1, 2))))
        edges += [Hyperedge(p, (u,), random.choice((0.0, 0.2)), 0.0, 1) for p in before]
    return Problem(tuple(units), tuple(edges), 0.0)


def layouts(
    problem: Problem,
    workers: int,
    split: bool = False,
    limit: float = inf,
    effort: float = 0.3,
) -> Layouts:
    asked = schedules.auto(workers, 4, split)
    return Layouts(problem, asked, [0] * len(problem.units), [], limit, effort=effort)


def chain(found: Layouts) -> Layout:
    """All in one stage a worker, in a row."""
    workers, order = found.asked.workers, found.order
    place = {u: i * workers // len(order) for i, u in enumerate(order)}
    cut = tuple(place[u] for u in range(len(order)))
    return Layout(cut, tuple(Place((w,)) for w in range(workers)))


@pytest.mark.parametrize("split", [False, True])
def test_a_search_is_as_good_as_another_annealing(split: bool) -> None:
    worst = 0.0
    for seed in range(3):
        found = layouts(branches(Random(seed)), 2 + seed % 2, split, effort=1.0)
        own = found.search([chain(found)], Random(0))
        assert own is not None
        ran = step_seconds(run_stages(own.schedule, own.stages))
        assert ran <= own.seconds * (1 + 1e-9)  # which may have sums of gradients
        blocks = blocks_of(found, split)
        best, state, _ = anneal(
            blocks, 4, found.asked.workers, lambda state: True, 1.5, seed
        )
        worst = max(worst, own.seconds / best)
        timed = step_seconds(run_stages(*planned(found, blocks, state)))
        assert timed == pytest.approx(best)
    assert worst <= 1.03


def test_a_search_is_as_long_as_what_it_may_save() -> None:
    tried = []
    for share in (1.0, 1.03, 2.0, inf):  # of a step that none is shorter than
        found = layouts(branches(Random(0)), 2)
        least = sum(unit.seconds for unit in found.problem.units) * 4 / 2
        own = found.search([chain(found)], Random(0), known=share * least)
        assert (own is None) == (share == 1.0)
        tried.append(found.tried)
    assert tried[0] == 0 < tried[1] < 0.5 * tried[2]
    assert tried[2] == tried[3]


@pytest.mark.parametrize("longest", [False, True])
def test_an_order_is_the_same_for_all_microbatches(longest: bool) -> None:
    found = layouts(branches(Random(1)), 3)
    made = found.made(chain(found)._replace(longest=longest))
    assert made is not None
    schedule, stages, *_ = made
    order = oldest_microbatch_first(len(stages))
    if longest:
        order = longest_way_first(stages, schedule.microbatches)
    for job in (Job(s, b, d) for s in stages for b in range(4) for d in (F, B)):
        assert schedule.n(*job) == order(*job)


def test_the_annealing_times_states_as_the_clock_does() -> None:
    random = Random(3)
    found = layouts(branches(random), 3)
    blocks = blocks_of(found, False)
    for _ in range(40):
        stage = [0]
        for _ in range(len(blocks.forward) - 1):
            stage.append(stage[-1] + (random.random() < 0.4))
        count = stage[-1] + 1
        state = State(
            tuple(stage),
            tuple(random.randrange(3) for _ in range(count)),
            tuple(random.randrange(1, 5) for _ in range(count)),
            tuple(random.random() for _ in range(2 * count)),
            random.random() < 0.3,
        )
        assert order(blocks, state) is not None
        seconds = step(blocks, state, 4, 3)
        events = run_stages(*planned(found, blocks, state))
        assert step_seconds(events) == pytest.approx(seconds) or not events.complete


def test_a_limit_is_kept_or_nothing_is_found() -> None:
    problem = branches(Random(1))
    free = layouts(problem, 2)
    best = free.search([chain(free)], Random(0))
    assert best is not None
    most = most_held(best.schedule, best.stages)
    less = layouts(problem, 2, limit=0.8 * most)
    found = less.search([chain(less)], Random(0))
    assert found is not None and found.seconds >= best.seconds * 0.999
    assert most_held(found.schedule, found.stages) <= 0.8 * most
    none = layouts(problem, 2, limit=1.0)
    assert none.search([chain(none)], Random(0)) is None


def test_equal_searches_find_the_same() -> None:
    problem = branches(Random(5))
    one, other = (layouts(problem, 3) for _ in range(2))
    found = [each.search([chain(each)], Random(0)) for each in (one, other)]
    assert found[0] is not None and found[1] is not None
    assert found[0].cut == found[1].cut and found[0].seconds == found[1].seconds


def test_auto_takes_the_best_of_the_library_for_stages_that_are_there() -> None:
    stages = nx.path_graph(4, nx.DiGraph)
    for s in stages:
        stages.nodes[s].update(forward=1.0, backward=2.0, held=1.0)
    found = simulate(schedules.auto(2, 8), stages).latency
    assert found <= min(
        simulate(schedules.LIBRARY[name](2, 8), stages).latency
        for name in ("graph", "interleaved", "looped_bfs")
    )


def test_candidates_have_the_workers_of_their_schedule() -> None:
    with pytest.raises(PlanError, match="for 2 workers and 4 microbatches"):
        Schedule(2, 4, candidates=(schedules.graph(3, 4),))


def test_a_limit_that_needs_blocks_computed_again_is_kept() -> None:
    model, inputs = gpt()
    schedule = schedules.auto(2, 4)
    free = plan(model, schedule, *inputs)
    limit = 0.8 * held(free)
    found = plan(model, schedule, *inputs, memory_limit=limit)
    assert held(found) <= limit
    assert found.simulate().latency >= free.simulate().latency * 0.99
    # of a cut through blocks, which are computed again stage by stage
    assert held(plan(model, free.schedule, *inputs, memory_limit=limit)) <= limit


def held(planned: Plan) -> float:
    """Bytes of the worker that holds the most."""
    return max(peaks.at_once.total for peaks in planned.memory)


def test_a_cut_is_of_one_model() -> None:
    model, inputs = mlp()
    found = plan(model, schedules.auto(2, 2), *inputs)
    again = plan(model, found.schedule, *inputs)
    assert again.simulate().latency == found.simulate().latency
    assert "schedules of the library: " in str(found.compared)
    with pytest.raises(PlanError, match="leave stages= out"):
        plan(model, found.schedule, *inputs, stages=["layers.1"])
    other, more = two_tower()
    with pytest.raises(PlanError, match="was made for another model"):
        plan(other, found.schedule, *more)


def test_candidates_of_other_numbers_of_stages_are_refused() -> None:
    model, inputs = mlp()
    fixed = schedules.interleaved(2, 2)
    schedule = Schedule(2, 2, 3, candidates=(fixed,))
    with pytest.raises(PlanError, match="has 4 stages, not 3; give candidates of as"):
        plan(model, schedule, *inputs)
