"""What fxsched.search finds, says and refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import Direction, Job, Link, PlanError, Schedule, schedules, search
from fxsched.accounts.paper import held_memory
from fxsched.clock.stage_graph import worker_bytes
from fxsched.progress import Progress
from fxsched.simulator.simulate import Simulation, simulate
from fxsched.tuner.candidate_comparison import Comparison
from fxsched.tuner.candidates import library, moves_weights
from fxsched.tuner.evaluate_order import fits, length, most, replay
from fxsched.tuner.list_scheduler import FIRST, Knobs, fill
from fxsched.tuner.local_search import pull_weights
from fxsched.tuner.ordering_problem import OrderingProblem, make_problem
from fxsched.tuner.stage_costs import of_durations

from ..bench.search import find, kept
from ..cases import MICROBATCHES, mlp, two_tower

ROWS = json.loads(
    (Path(__file__).parents[1] / "reference/zero_bubble.json").read_text()
)
TIMES = {"F": 2.0, "B": 3.0, "W": 1.0}


def step(schedule: Schedule, times: dict[str, float], transfer: float) -> Simulation:
    """The step where `times` are of a stage if there is one for each worker."""
    stages = schedule.stages or schedule.workers
    share = {d: x * schedule.workers / stages for d, x in times.items()}
    return simulate(schedule, stages, share, transfer)


def activations(found: Simulation) -> float:
    """The most of a worker, counted in stages if there is one for each worker."""
    size = len(found.workers) / len(found.stages)
    return size * max(worker.peak_activations for worker in found.workers)


def tree() -> nx.DiGraph[int]:
    stages: nx.DiGraph[int] = nx.DiGraph()
    for s, seconds in enumerate((1.0, 1.0, 1.5, 1.0, 2.0)):
        stages.add_node(s, forward=seconds, backward=2 * seconds, held=100, weights=50)
    stages.add_edges_from([(0, 2), (1, 3), (2, 4), (3, 4)], seconds=0.1, bytes=10)
    return stages


@pytest.mark.slow
@pytest.mark.parametrize("row", [0, 2])
@pytest.mark.parametrize("key", ["zb_1p", "zb_2p"])
def test_as_short_as_the_schedules_searched_for_zero_bubble(row: int, key: str) -> None:
    """All rows: python -m tests.bench search."""
    rate, peak, _, _ = find(ROWS[row], key, effort=0.3)
    assert rate <= ROWS[row][key] + 0.01
    assert peak <= ROWS[row]["workers"] * int(key[3])


@pytest.mark.slow
def test_and_with_one_stage_a_worker_where_b_frees_memory_too() -> None:
    row = ROWS[0]
    rate, _, stages, _ = find(row, "zb_2p", effort=0.3, stages=8, kept=kept(row))
    assert stages == 8 and rate == pytest.approx(row["zb_2p"], abs=1e-4)


@pytest.mark.slow
def test_equal_seeds_give_equal_schedules() -> None:
    def orders(seed: int) -> list[tuple[Job, int]]:
        found = search(TIMES, 4, 8, 5, 0.1, seed, quiet=True, effort=0.1)
        return [(e.job, e.worker) for e in step(found, TIMES, 0.1).timeline]

    assert orders(3) == orders(3)


@pytest.mark.slow
def test_the_table_marks_the_best_and_its_step_is_the_simulated_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = search(TIMES, 4, 8, 4, 0.1, effort=0.2)
    told = capsys.readouterr()
    best = [line for line in told.out.splitlines() if line.endswith("best")]
    assert len(best) == 1
    assert f" {step(found, TIMES, 0.1).latency:.4g} " in best[0]
    assert "zb_h2" in told.out and " over the limit\n" in told.out
    assert "not compared, since they move weights" in told.out and "ddp" in told.out
    assert max(map(len, told.out.splitlines())) <= 88


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["latency", "span"])
@pytest.mark.parametrize("limit", [2.0, 4.0, None])
def test_no_schedule_of_the_library_within_the_limit_is_shorter(
    objective: str, limit: float | None
) -> None:
    found = search(TIMES, 4, 8, limit, 0.2, objective=objective, quiet=True, effort=0.1)
    mine = step(found, TIMES, 0.2)
    assert limit is None or activations(mine) <= limit
    graphs = of_durations(TIMES, 4, [4, 8, 12, 16]).graphs
    for other in library(4, 8, graphs, copies=False):
        if moves_weights(other.schedule, other.stages):
            continue
        its = simulate(other.schedule, other.stages, None, 0.2)
        if limit is None or activations(its) <= limit:
            assert getattr(mine, objective) <= getattr(its, objective) * (1 + 1e-9)


def test_schedules_that_move_weights_are_compared_if_that_takes_time() -> None:
    found = search(TIMES, 4, 8, None, 0.0, prefetch=1, quiet=True, effort=0.1)
    simulation = simulate(found, found.stages, TIMES, 0.0, 1)
    assert simulation.bubble_rate == 0  # whole microbatches: there is nothing to fill


@pytest.mark.parametrize("workers", [2, 4])
def test_servers_are_as_many_as_a_schedule_has_by_itself(workers: int) -> None:
    graphs = of_durations(TIMES, workers, [workers]).graphs
    found = {each.name for each in library(workers, 12, graphs, False)}
    assert "parameter_server" in found and "hybrid" in found
    assert ("sharded_parameter_server" in found) is (workers > 2)


def test_a_tree_of_stages_within_its_limit() -> None:
    for limit in (500.0, 700.0):
        found = search(tree(), 3, 8, limit, quiet=True, effort=0.1)
        mine = simulate(found, tree(), None, None)
        assert max(worker_bytes(found, tree(), mine.timeline)) <= limit
    graph = simulate(fxsched.schedules.graph(3, 8), tree(), None, None)
    assert mine.latency <= graph.latency


def test_stages_on_links() -> None:
    link = Link(bandwidth=100.0, latency=0.05)
    found = search(tree(), 3, 8, None, link, prefetch=1, quiet=True, effort=0.1)
    assert simulate(found, tree(), None, link, 1).latency < 70


def test_unequal_stages_stage_by_stage() -> None:
    times = {"F": [1.0, 2.0, 1.0], "B": [2.0, 4.0, 2.0]}
    found = search(times, 3, 6, quiet=True, effort=0.1)
    assert found.stages == 3
    chain = of_durations(times, 3, []).graphs[3]
    assert simulate(found, chain, None, 0.0).latency >= 6 * 6.0


@pytest.mark.slow
def test_a_plan_has_its_own_workers_and_microbatches() -> None:
    model, inputs = two_tower()
    schedule = fxsched.schedules.graph(2, MICROBATCHES)
    plan = fxsched.plan(model, schedule, *inputs)
    found = search(plan, quiet=True, effort=0.1)
    assert (found.workers, found.microbatches) == (2, MICROBATCHES)
    assert found.stages == len(plan.stages)
    before = simulate(plan.schedule, plan.stages, None, None)
    assert simulate(found, plan.stages, None, None).latency <= before.latency


@pytest.mark.slow
def test_a_model_is_planned_for_each_number_of_stages_that_it_has() -> None:
    model, inputs = mlp()
    found = search(model, 2, args=inputs, stages=(2, 99), quiet=True, effort=0.1)
    assert found.microbatches == 4 and found.stages == 2  # it has no 99 parts
    plan = fxsched.plan(model, found, *inputs)
    assert len(plan.stages) == found.stages


def test_a_module_that_the_model_does_not_call_is_an_error_at_the_first_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuts: list[str] = []
    monkeypatch.setattr(Progress, "at", lambda self, what, *_: cuts.append(what))
    model, inputs = mlp()
    with pytest.raises(PlanError, match="stages names module 'none'"):
        search(model, 2, args=inputs, kwargs={"stages": ["none"]}, quiet=True)
    assert sum(each.startswith("comparing schedules") for each in cuts) == 1


@pytest.mark.slow
def test_copies_of_an_open_schedule_are_made_for_the_stages_they_run_on() -> None:
    model, x = nn.Sequential(*(nn.Linear(16, 16) for _ in range(5))), torch.randn(8, 16)
    size = {"workers": 4, "microbatches": 8, "stages": (2, 5)}
    found = search(Squared(model), args=(x,), quiet=True, effort=0.02, **size)
    assert found.workers == 4


class Squared(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x).square().mean()


def least_bytes(options: dict[str, Any]) -> int:
    """Bytes of the schedule that holds the least, of an mlp on two workers."""
    model, inputs = mlp()
    if "optimizer" in options:
        options = {"optimizer": options["optimizer"](model.parameters())}
    with pytest.raises(PlanError, match=r"the best found holds (\d+) bytes") as refused:
        search(model, 2, 4, 1, args=inputs, kwargs=options, stages=2, quiet=True)
    return int(re.findall(r"holds (\d+) bytes", str(refused.value))[0])


@pytest.mark.slow
def test_an_optimizers_state_counts_where_weights_are_stepped() -> None:
    weights = [p.nbytes for p in mlp()[0].parameters()]
    stateless = least_bytes({"optimizer": torch.optim.SGD})
    assert least_bytes({}) == stateless
    more = least_bytes({"optimizer": torch.optim.Adam}) - stateless
    # two moments of the weights of the fuller worker, and counts of steps
    assert sum(weights) <= more < 2.1 * sum(weights)

    stages = nx.path_graph(2, create_using=nx.DiGraph)
    for s, data in stages.nodes(data=True):
        data.update(forward=1.0, backward=2.0, held=1.0, weights=10.0, state=8.0 + s)
    stages.edges[0, 1].update(bytes=0, seconds=0.0)
    with pytest.raises(PlanError, match="least found is 20 bytes, of naive"):
        search(stages, 2, 2, memory_limit=18, quiet=True)
    zero1 = schedules.zero1(2, 2)
    held = held_memory(zero1, stages, simulate(zero1, stages).timeline)
    assert [memory.state for memory in held] == [8.0, 9.0]
    ddp = schedules.ddp(2, 2)
    held = held_memory(ddp, stages, simulate(ddp, stages).timeline)
    assert [memory.state for memory in held] == [17.0, 17.0]


def test_a_limit_that_nothing_meets_names_the_least_memory() -> None:
    with pytest.raises(PlanError, match=r"memory_limit=0.9.*the least found is 1 acti"):
        search(TIMES, 4, 8, 0.9, quiet=True, effort=0.1)
    with pytest.raises(PlanError, match=r"the least found is 300 bytes.*raise the lim"):
        search(tree(), 3, 8, 150, quiet=True, effort=0.1)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "workers": ({"workers": 0}, "workers=0.*int of 1 or more"),
    "no workers": ({"workers": None}, "workers=None.*int of 1 or more"),
    "microbatches": ({"microbatches": 1.5}, "microbatches=1.5.*int of 1 or more"),
    "memory": ({"memory_limit": 0}, "memory_limit=0.*above 0"),
    "transfer": ({"transfer": -1.0}, "transfer=-1.0.*0 or more"),
    "prefetch": ({"prefetch": 1}, "prefetch=1, transfer=None.*number or a Link"),
    "objective": ({"objective": "time"}, "'time'.*'latency' or 'span'"),
    "kept": ({"kept": 2.0}, "kept=2.0.*from 0 to 1"),
    "effort": ({"effort": 0}, "effort=0.*above 0"),
    "stages": ({"stages": [4, 0]}, "stages=0.*int of 1 or more"),
    "durations": ({"subject": {"F": 1}}, "times of F, B and"),
    "time": ({"subject": {"F": 1, "B": -2}}, "-2 is not a time"),
    "lists": ({"subject": {"F": [1, 1], "B": [1]}}, "of one length"),
    "subject": ({"subject": 3}, r"search\(3\).*a Plan, or a model"),
    "nodes": ({"subject": nx.DiGraph([(1, 2)])}, "number them from 0"),
    "edges": ({"subject": nx.DiGraph([(1, 0)])}, "order of data flow"),
    "times": ({"subject": nx.DiGraph([(0, 1)])}, "no `forward` and `backward`"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_and_what_is_allowed(case: str) -> None:
    given, message = REFUSED[case]
    with pytest.raises(PlanError, match=message):
        search(**{"subject": TIMES, "workers": 2, "quiet": True, **given})


def task(split: bool = True, limit: float = 6.0, kept: float = 0.5) -> OrderingProblem:
    """Two stages a worker in turns."""
    schedule = Schedule(3, 6, 6, lambda s, b, d: (s % 3, s % 3), split_backward=split)
    chain = of_durations(TIMES, 3, [6]).graphs[6]
    found = make_problem(schedule, chain, 0.25, kept, limit)
    assert found is not None
    return found


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("first", FIRST)
def test_filled_orders_run_within_the_room_and_as_simulated(
    first: str, split: bool
) -> None:
    mine = task(split)
    orders = fill(mine, Knobs(first=first))
    assert orders is not None
    assert all(fits(mine, w, order) for w, order in enumerate(orders))
    times = replay(mine, orders)
    assert times is not None
    place = {j: i for order in orders for i, j in enumerate(order)}
    schedule = Schedule(
        3,
        6,
        6,
        mine.schedule.w,
        lambda s, b, d: place[mine.jobs.number(Job(s, b, d))],
        split_backward=split,
        in_order=True,
    )
    chain = of_durations(TIMES, 3, [6]).graphs[6]
    found = simulate(schedule, chain, None, 0.25)
    assert found.latency == pytest.approx(length(orders, times, "latency"))
    assert found.span == pytest.approx(length(orders, times, "span"))
    held = worker_bytes(schedule, chain, found.timeline, 0.5)
    assert held == pytest.approx([most(mine, order) for order in orders])
    assert max(held) <= 6.0


def test_weight_jobs_move_into_gaps_and_nothing_starts_later() -> None:
    mine = task(limit=100.0)
    orders = fill(mine, Knobs(fit=10.0))
    assert orders is not None
    times = replay(mine, orders)
    assert times is not None
    moved = pull_weights(mine, orders, times, 1.0)
    after = replay(mine, moved)
    assert after is not None and moved != orders
    for j, start in enumerate(times.start):
        if mine.jobs.kinds[mine.jobs.kind[j]][1] is not Direction.WEIGHT:
            assert after.start[j] <= start + 1e-9


class Normed(nn.Sequential):
    """Layers with a BatchNorm among them."""

    def __init__(self) -> None:
        layers = [nn.Linear(64, 64) for _ in range(8)]
        super().__init__(*layers[:4], nn.BatchNorm1d(64), *layers[4:])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def test_schedules_for_a_model_with_global_batch_stages_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan that a schedule was chosen for is made again, or one much like it."""
    model = Normed()
    x, file, compared = torch.randn(8, 64), tmp_path / "found.json", list[Comparison]()
    monkeypatch.setattr(Comparison, "table", lambda self, best: compared.append(self))
    search(model, args=(x,), workers=2, microbatches=4)
    rows = compared[0].rows
    assert "auto" in {row.candidate.name for row in rows}
    for row in rows:
        plan = fxsched.plan(model, row.candidate.schedule, x)
        assert len(plan.stages) == len(row.candidate.stages)
        assert plan.simulate().latency <= row.simulation.latency * 1.1
        row.candidate.schedule.save(file)
        plan = fxsched.plan(model, fxsched.load_schedule(file), x)
        assert len(plan.stages) == len(row.candidate.stages)
