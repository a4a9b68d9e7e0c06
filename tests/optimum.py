"""schedules.auto against the shortest step that CP-SAT proves.

`python -m tests.optimum` makes random graphs of 6 to 10 blocks, for 2 or 3 workers and
2 to 4 microbatches, all with a limit of memory. In the model of CP-SAT each block is a
stage: jobs take no time besides that of their blocks, so no other cut has a shorter
step. It chooses the worker of each block and the start of each job. auto may be ahead,
as several workers can take microbatches of a stage in turns.
"""

from __future__ import annotations

import argparse
import statistics
from random import Random
from typing import NamedTuple

from ortools.sat.python import cp_model
from tabulate import tabulate

from fxsched import PlanError, schedules
from fxsched.partition.cut_cost import Hyperedge, Problem, Unit
from fxsched.partition.layouts import Layouts
from fxsched.partition.planner import choose_cut, most_held, stage_graph

MORE = 1.1  # of what graph holds, as auto allows it


class Case(NamedTuple):
    """A graph of units with whole numbers as times and bytes; limit: of a worker."""

    problem: Problem
    workers: int
    microbatches: int
    limit: float


def case(number: int) -> Case:
    """A random graph: each block reads one or two of those shortly before it."""
    random = Random(number)
    units, edges = [], []
    for u in range(random.randint(6, 10)):
        f, held = random.randint(2, 9), random.randint(1, 9)
        weights = random.randint(1, 9)
        units.append(Unit(f, f + random.randint(0, 9), held, weights, fetch=2))
        before = range(max(0, u - 3), u)
        for p in random.sample(before, min(len(before), random.choice((1, 1, 2)))):
            edges.append(Hyperedge(p, (u,), random.choice((0, 1)), 0, 1))
    workers, count = random.choice((2, 3)), random.choice((2, 3, 4))
    problem = Problem(tuple(units), tuple(edges), 0.0)
    graph = choose_cut(problem, schedules.graph(workers, count))
    held = most_held(graph.schedule, stage_graph(problem, graph.cut))
    return Case(problem, workers, count, round(held * random.choice((MORE, 0.9))))


def searched(case: Case) -> float:
    """The step that the planner finds."""
    problem, workers, count, limit = case
    asked = schedules.auto(workers, count)
    layouts = Layouts(problem, asked, [0] * len(problem.units), [], limit)
    starts = []
    for candidate in asked.candidates:
        try:
            found = choose_cut(problem, candidate)
        except PlanError:
            continue
        stages = stage_graph(problem, found.cut)
        starts.append(layouts.start(found.cut, found.schedule, stages))
    found_one = layouts.search([s for s in starts if s is not None], Random(0))
    return float("inf") if found_one is None else found_one.seconds


def optimum(case: Case, seconds: float) -> tuple[float, bool]:
    """The shortest step that CP-SAT finds, and whether it is proven; infinite if there
    is none within the limit."""
    problem, workers, count, limit = case
    units, model = problem.units, cp_model.CpModel()
    horizon = (
        int(sum(u.seconds for u in units) * count) + len(problem.edges) * count * 2
    )
    on = [[model.new_bool_var("") for _ in range(workers)] for _ in units]
    for own in on:
        model.add_exactly_one(own)
    model.add(on[0][0] == 1)  # workers are alike
    start, end = {}, {}
    for u, unit in enumerate(units):
        for b in range(count):
            for d, length in enumerate((int(unit.forward), int(unit.backward))):
                start[u, b, d] = model.new_int_var(0, horizon, "")
                end[u, b, d] = start[u, b, d] + length
    step = model.new_int_var(0, horizon, "")
    for (u, b, d), when in end.items():
        model.add(when <= step)
        if d:
            model.add(start[u, b, 1] >= end[u, b, 0])
        if b + 1 < count:  # microbatches are alike
            model.add(start[u, b, d] <= start[u, b + 1, d])
    for edge in problem.edges:
        (reader,) = edge.readers
        apart = model.new_bool_var("")
        for w in range(workers):
            model.add(apart >= on[edge.maker][w] - on[reader][w])
        late = int(edge.there) * apart
        for b in range(count):
            model.add(start[reader, b, 0] >= end[edge.maker, b, 0] + late)
            model.add(start[edge.maker, b, 1] >= end[reader, b, 1] + late)
    for w in range(workers):
        busy, held, sizes = [], [], []
        for (u, b, d), when in start.items():
            length = int(units[u].backward if d else units[u].forward)
            busy.append(
                model.new_optional_fixed_size_interval_var(when, length, on[u][w], "")
            )
            if not d:
                whole = model.new_int_var(0, horizon, "")
                model.add(whole == end[u, b, 1] - when)
                held.append(
                    model.new_optional_interval_var(
                        when, whole, end[u, b, 1], on[u][w], ""
                    )
                )
                sizes.append(int(units[u].held))
        model.add_no_overlap(busy)
        kept = sum(int(unit.weights) * on[u][w] for u, unit in enumerate(units))
        room = model.new_int_var(0, int(limit), "")
        model.add(room + kept == int(limit))
        model.add_cumulative(held, sizes, room)
    model.minimize(step)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    status = solver.solve(model)
    assert status != cp_model.MODEL_INVALID, model.validate()
    if status == cp_model.INFEASIBLE:
        return float("inf"), True
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    best = solver.objective_value if found else float("inf")
    return best, status == cp_model.OPTIMAL


def main() -> int:
    """1 if auto is more than 3 % behind a proven optimum, or 1 % in the median."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--graphs", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each proof")
    options = parser.parse_args()
    rows, ratios = [], []
    for number in range(options.graphs):
        each = case(number)
        best, proven = optimum(each, options.seconds)
        own = searched(each)
        ratio = own / best if best < float("inf") else 1.0
        if proven:
            ratios.append(ratio)
        sizes = len(each.problem.units), each.workers, each.microbatches
        rows.append((number, *sizes, own, best, "yes" if proven else "no", ratio))
        print(*rows[-1], flush=True)
    headers = ["graph", "blocks", "W", "M", "auto", "CP-SAT", "proven", "ratio"]
    print(tabulate(rows, headers))
    worst, median = max(ratios), statistics.median(ratios)
    print(f"{len(ratios)} proven: median {median:.3f}, worst {worst:.3f}")
    return int(worst > 1.03 or median > 1.01)


if __name__ == "__main__":
    raise SystemExit(main())
