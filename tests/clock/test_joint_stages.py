"""Stages where rows of microbatches meet: one job a direction, on all rows."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import pickle
import random
import re
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import networkx as nx
import pytest

import fxsched
from fxsched import Direction, Job, PlanError, Schedule
from fxsched.cli import main as cli
from fxsched.clock.event_loop import run_jobs
from fxsched.clock.joint import fit_joint, joint_text
from fxsched.clock.stage_graph import stage_jobs
from fxsched.jobs.job import ALL_ROWS
from fxsched.partition.joint_stages import with_joint
from fxsched.schedules import LIBRARY, STALE
from fxsched.simulator.simulate import Simulation
from fxsched.tuner.evaluate_order import ranks, replay
from fxsched.tuner.list_scheduler import Knobs, fill
from fxsched.tuner.ordering_problem import make_problem

FORWARD, BACKWARD, WEIGHT, _ = Direction


def graph(
    edges: Collection[tuple[int, int]],
    joint: Collection[int],
    frozen: Collection[int] = (),
) -> nx.DiGraph[int]:
    """Stages whose F takes 1 and B 2, of global-batch ones 3 and 6; frozen ones have no
    B."""
    stages: nx.DiGraph[int] = nx.DiGraph()
    stages.add_nodes_from(range(1 + max((b for _, b in edges), default=0)))
    stages.add_edges_from(edges, seconds=0.0)
    for s, data in stages.nodes(data=True):
        work = 3.0 if s in joint else 1.0
        data.update(forward=work, backward=0.0 if s in frozen else 2 * work)
        data["joint"] = s in joint
    return stages


def waits(
    stages: nx.DiGraph[int], microbatches: int, split: bool
) -> Iterator[tuple[tuple[int, int, str], tuple[int, int, str]]]:
    """What is said of global-batch stages, job by job: pairs of a job and one after
    it."""
    joint = {s for s, data in stages.nodes(data=True) if data["joint"]}
    back = {s for s, data in stages.nodes(data=True) if data["backward"]}
    for b in range(microbatches):

        def of(s: int, d: str, b: int = b) -> tuple[int, int, str]:
            return (s, 0 if s in joint else b, d)

        for reads, s in stages.edges:
            yield of(reads, "F"), of(s, "F")
            if reads in back and s in back:
                yield of(s, "B"), of(reads, "B")
        for s in back:
            yield of(s, "F"), of(s, "B")
            if split:
                yield of(s, "B"), of(s, "W")


def check(result: Simulation, stages: nx.DiGraph[int]) -> None:
    """Each job once, global-batch ones once for all microbatches, after what they wait
    for."""
    joint = {s for s, data in stages.nodes(data=True) if data["joint"]}
    schedule = result.schedule
    times = {
        (e.job.stage, e.job.microbatch, e.job.direction.value): (e.start, e.end)
        for e in result.timeline
    }
    assert len(times) == len(result.timeline)
    assert set(times) == {
        (s, b, d.value)
        for s in stages
        for b in range(1 if s in joint else schedule.microbatches)
        for d in schedule.directions
        if d is FORWARD or stages.nodes[s]["backward"]
    }
    for before, after in waits(stages, schedule.microbatches, schedule.split_backward):
        assert times[before][1] <= times[after][0], (before, after)


# 0 and 1 are encoders, 2 their loss over all pairs
TOWERS = [(0, 2), (1, 2)]
ENDS = {
    "at the end": (TOWERS, {2}),
    "in the middle": ([(0, 1), (1, 2), (2, 3)], {1}),
    "one after the other": ([(0, 1), (1, 2), (2, 3)], {1, 2}),
    "two, microbatches between": ([(0, 1), (1, 2), (2, 3), (0, 3)], {1, 3}),
    "first": ([(0, 1), (1, 2)], {0}),
    "alone": ([], {0}),
    "all": (TOWERS, {0, 1, 2}),
    "in the middle, numbered last": ([(0, 3), (3, 1), (1, 2)], {3}),
}


@pytest.mark.parametrize("case", ENDS)
@pytest.mark.parametrize("split", [False, True])
def test_a_joint_job_waits_for_all_microbatches_and_they_for_it(
    case: str, split: bool
) -> None:
    edges, joint = ENDS[case]
    stages = graph(edges, joint)
    schedule = Schedule(
        2, 3, w=lambda s, b, d: (s % 2, (s + b) % 2), split_backward=split
    )
    nx.set_edge_attributes(stages, 0.75, "seconds")
    for transfer in (0.0, 0.5, None):
        check(fxsched.simulate(schedule, stages, None, transfer), stages)


def drawn(draw: random.Random, count: int) -> Schedule:
    """Random w and n of so many stages."""
    workers, batch = draw.randint(1, 3), draw.randint(1, 4)
    places = [[draw.randrange(workers) for _ in range(batch)] for _ in range(count)]
    ranks = [draw.sample(range(99), 3 * batch) for _ in range(count)]
    return Schedule(
        workers,
        batch,
        w=lambda s, b, d: (places[s][b], places[s][b]),
        n=lambda s, b, d: ranks[s][3 * b + "FBW".index(d.value)],
        split_backward=draw.random() < 0.5,
    )


def test_random_graphs_with_joint_stages_wait_as_the_graph_says() -> None:
    draw = random.Random(3)
    for _ in range(150):
        count = draw.randint(2, 7)
        edges = [(a, b) for b in range(count) for a in range(b) if draw.random() < 0.4]
        joint = {s for s in range(count) if draw.random() < 0.4}
        stages = graph([*edges, (count - 2, count - 1)], joint)
        transfer = draw.choice([0.0, 0.25, None])
        check(fxsched.simulate(drawn(draw, count), stages, None, transfer), stages)


def test_joint_jobs_print_with_a_star_and_are_microbatch_0() -> None:
    job = Job.parse("3F*")
    assert str(job) == "3F*" and job.microbatch is ALL_ROWS
    assert job == Job(3, 0, FORWARD) == Job.parse("3F0")
    timeline = fxsched.simulate(
        Schedule(1, 2), graph(*ENDS["at the end"]), None
    ).timeline
    assert [str(event.job) for event in timeline].count("2F*") == 1
    with pytest.raises(PlanError, match=r"'3U\*' is not a job"):
        Job.parse("3U*")


def test_w_is_asked_with_microbatch_0_and_n_with_the_last_for_f() -> None:
    asked: set[tuple[str, int, int, str]] = set()

    def w(s: int, b: int, d: Direction) -> tuple[int, int]:
        asked.add(("w", s, b, d.value))
        return 0, 0

    def n(s: int, b: int, d: Direction) -> int:
        asked.add(("n", s, b, d.value))
        return 0

    schedule = Schedule(1, 3, w=w, n=n, split_backward=True)
    jobs = stage_jobs(schedule, graph(*ENDS["at the end"]))
    assert {each for each in asked if each[1] == 2} == {
        *(("w", 2, 0, d) for d in "FBW"),
        ("n", 2, 2, "F"),
        ("n", 2, 0, "B"),
        ("n", 2, 0, "W"),
    }
    assert len(jobs) == 2 * 3 * 3 + 3


def test_each_microbatch_sends_a_message_into_a_joint_job_and_out_of_it() -> None:
    stages = graph([(0, 1), (1, 2)], {1})
    schedule = Schedule(3, 4, w=lambda s, b, d: (s, s))
    workers = fxsched.simulate(schedule, stages, None).workers
    assert [(w.activations_received, w.activations_sent) for w in workers] == [
        (4, 4),
        (8, 8),
        (4, 4),
    ]
    link = fxsched.Link(bandwidth=1.0)
    for a, b in stages.edges:
        stages.edges[a, b]["bytes"] = 5.0
    result = fxsched.simulate(schedule, stages, None, link)
    starts = {str(e.job): e.start for e in result.timeline}
    assert starts["1F*"] == 1 + 4 * 5  # the link is busy from the first end on
    first = starts["1F*"] + 3
    assert [starts[f"2F{b}"] for b in range(4)] == [first + 5 * k for k in (1, 2, 3, 4)]


def test_schedules_of_the_library_run_unchanged_on_joint_stages() -> None:
    """Caps and strict orders made for microbatches too."""
    for name, make in {**LIBRARY, "saved": one_f_one_b}.items():
        if name in STALE:
            continue
        arguments = {"workers": 4, "microbatches": 8, "group_size": 2, "servers": 2}
        takes = inspect.signature(make).parameters
        schedule = make(**{k: v for k, v in arguments.items() if k in takes})
        for joint in ({3}, {1}, {0}, {1, 2}):
            stages = nx.path_graph(schedule.stages or 4, nx.DiGraph)
            joined = graph(stages.edges, joint)
            result = fxsched.simulate(schedule, joined, None)
            check(result, joined)


@pytest.mark.parametrize(
    ("name", "workers", "microbatches"),
    [
        *(("zb_h1", 3, 4), ("zb_h1", 3, 6), ("zb_h1", 4, 8), ("zb_h2", 3, 6)),
        *(("zb_h2", 4, 8), ("v_min", 3, 6), ("v_min", 4, 8)),
    ],
)
def test_strict_orders_keep_their_caps_beside_a_joint_stage_without_backward(
    name: str, workers: int, microbatches: int
) -> None:
    """As that of a buffer which is written from the whole batch: no B waits for it."""
    schedule = LIBRARY[name](workers=workers, microbatches=microbatches)
    count = schedule.stages or 0
    for read in range(count):
        edges = [*itertools.pairwise(range(count)), (read, count)]
        stages = graph(edges, {count}, {count})
        known = with_joint(schedule, {count: read}, range(count))
        check(fxsched.simulate(known, stages, None), stages)


def one_f_one_b(workers: int, microbatches: int) -> Schedule:
    """1f1b, as it comes back from a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/saved.json"
        fxsched.schedules.one_f_one_b(workers, microbatches).save(path)
        return fxsched.load_schedule(path)


def test_caps_of_the_library_are_lifted_before_a_joint_stage_alone() -> None:
    schedule = fxsched.schedules.one_f_one_b(workers=4, microbatches=8)
    result = fxsched.simulate(schedule, joint=[2])
    assert [worker.peak_activations for worker in result.workers] == [8, 8, 1, 1]
    assert result.schedule.in_flight.lifted == {0, 1}
    unjoined = fxsched.simulate(schedule)
    assert [worker.peak_activations for worker in unjoined.workers] == [4, 3, 2, 1]


def stops(schedule: Schedule, stages: nx.DiGraph[int]) -> bool:
    """Whether its caps stop it, by running it."""
    jobs = stage_jobs(schedule, stages)
    return not run_jobs(
        jobs, [1.0] * len(jobs), schedule.cap, schedule.release
    ).complete


def test_a_cap_of_the_users_is_an_error_that_names_the_smallest_that_works() -> None:
    draw = random.Random(5)
    seen = Counter[bool]()
    for _ in range(120):
        count = draw.randint(2, 5)
        edges = [(a, b) for b in range(count) for a in range(b) if draw.random() < 0.5]
        joint = {s for s in range(count) if draw.random() < 0.4}
        frozen = {s for s in range(count) if draw.random() < 0.2}
        stages = graph([*edges, (count - 2, count - 1)], joint, frozen)
        schedule = replace(drawn(draw, count), n=lambda s, b, d: b)
        least = next(c for c in range(1, 9) if not stops(capped(schedule, c), stages))
        for cap in range(1, least + 1):
            seen[cap < least] += 1
            if cap == least:
                check(fxsched.simulate(capped(schedule, cap), stages, None), stages)
                continue
            with pytest.raises(PlanError, match=f"smallest that works is {least}$"):
                fxsched.simulate(capped(schedule, cap), stages, None)
    assert min(seen.values()) > 30


def capped(schedule: Schedule, cap: int) -> Schedule:
    return replace(schedule, in_flight=cap)


def test_a_function_of_the_users_is_told_what_each_stage_needs() -> None:
    schedule = Schedule(
        2, 4, w=lambda s, b, d: ((s, 0), (1, b % 2), (0, 0))[s], in_flight=lambda s: 1
    )
    message = (
        r"in_flight=1 stops the schedule: stage 2 runs once, on all rows \(2F\*\), so "
        r"B of stage 0 waits for F of all 4 microbatches; the smallest that works is 4 "
        r"for stage 0, 2 for stage 1$"
    )
    with pytest.raises(PlanError, match=message):
        fxsched.simulate(schedule, 3, joint=[2])


def test_a_function_is_told_what_its_own_stages_need() -> None:
    """Not the plan's, of which there are more."""
    schedule = Schedule(
        2, 4, 2, w=lambda s, b, d: (s, s), in_flight=lambda s: (4, 3)[s]
    )
    message = (
        r"in_flight=3 stops the schedule: stage 3 runs once, on all rows \(3F\*\), so "
        r"B of stage 2 \(of stage 1 of the schedule\) waits for F of all 4 "
        r"microbatches; the smallest that works is 4 for stage 1$"
    )
    stages = graph([(0, 1), (1, 2), (2, 3)], {3})
    with pytest.raises(PlanError, match=message):
        fit_joint(with_joint(schedule, {3: 2}, [0, 0, 1]), stages)


def test_updates_of_parts_of_the_batch_are_refused() -> None:
    schedule = fxsched.schedules.gpipe(workers=2, microbatches=4)
    message = (
        r"^update_every=2: rows of all 4 microbatches meet in stage 1, whose gradients "
        r"come once a call; give update_every=4, or None, and no average_every$"
    )
    with pytest.raises(PlanError, match=message):
        fxsched.simulate(replace(schedule, update_every=2), joint=[1])
    whole = replace(schedule, update_every=4)
    result = fxsched.simulate(whole, joint=[1])
    ends = {str(e.job): e.end for e in result.timeline}
    starts = {str(e.job): e.start for e in result.timeline}
    assert starts["1U3"] >= ends["1B*"] and starts["0U3"] >= ends["0B3"]
    with pytest.raises(PlanError, match=r"^average_every=1: rows of all 4"):
        copies = fxsched.schedules.ddp(2, 4)
        copies = replace(copies, update_every=4, average_every=1)
        fxsched.simulate(copies, 2, joint=[1])


@pytest.mark.parametrize("joint", ["1", 1, [2], [True]])
def test_joint_takes_numbers_of_stages(joint: Any) -> None:
    with pytest.raises(PlanError, match=r"simulate\(joint="):
        fxsched.simulate(Schedule(1, 2), 2, joint=joint)


def test_strict_orders_found_for_joint_stages_are_kept() -> None:
    """n that can be taken strictly is; else what waits for a global-batch job comes
    after."""
    order = {"0F1": 0, "1F*": 2, "0F0": 1, "1B*": 3, "0B1": 4, "0B0": 5}

    def n(s: int, b: int, d: Direction) -> int:
        return order.get(f"{s}{d}*" if s else f"{s}{d}{b}", 9)

    stages = graph([(0, 1)], {1})
    schedule = Schedule(1, 2, n=n, in_order=True)
    ran = [str(e.job) for e in fxsched.simulate(schedule, stages, None).timeline]
    assert ran == ["0F1", "0F0", "1F*", "1B*", "0B1", "0B0"]
    order["0B1"] = 0
    ran = [str(e.job) for e in fxsched.simulate(schedule, stages, None).timeline]
    assert ran == ["0F1", "0F0", "1F*", "1B*", "0B1", "0B0"]


def test_a_strict_order_made_for_fewer_stages_fits() -> None:
    """n that has B before F, as orders have of stages beyond theirs."""
    stages = graph([(0, 1), (1, 2), (2, 3)], {1})
    schedule = Schedule(
        1, 2, n=lambda s, b, d: -s if d is FORWARD else -9, in_order=True
    )
    check(fxsched.simulate(schedule, stages, None), stages)


def test_pictures_show_a_joint_job_as_one_block() -> None:
    schedule = fxsched.schedules.gpipe(workers=2, microbatches=2)
    times = {"F": 2, "B": 3}
    diagram = fxsched.simulate(schedule, durations=times, joint=[1]).diagram()
    _, _, first, second, *_ = diagram.text(60).splitlines()
    assert re.sub("[-. ]+", " ", first).split() == ["0", "0F0", "0F1", "0B0", "0B1"]
    assert re.sub("[-. ]+", " ", second).split() == ["1", "1F*", "1B*"]
    assert "1F*, worker 1, 4 to 6" in diagram.svg()
    (text,) = re.findall('<script id="data"[^>]*>(.*?)</script>', diagram.html())
    data = json.loads(text)
    joint = [b == data["joint"] for b in data["microbatch"]]
    assert [s == 1 for s in data["stage"]] == joint and data["joint"] == 2
    assert len(data["palette"]) == 3
    assert "*" not in fxsched.simulate(schedule).diagram().svg()


def test_the_microbatch_of_joint_jobs_is_one_object_in_all_processes() -> None:
    assert pickle.loads(pickle.dumps(ALL_ROWS)) is ALL_ROWS
    assert copy.deepcopy(Job.parse("0B*")).joint


def test_the_command_simulates_joint_stages(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "simulate --schedule 1f1b --workers 3 --microbatches 4 --joint 2"
    cli.main(words.split())
    shown = capsys.readouterr().out
    result = fxsched.simulate(fxsched.schedules.one_f_one_b(3, 4), joint=[2])
    assert "2F*" in shown and result.table() in shown


def test_search_finds_schedules_for_joint_stages() -> None:
    """Never behind the library, and what it finds runs as the simulator said."""
    stages = graph([(0, 2), (1, 3), (2, 4), (3, 4)], {4})
    found = fxsched.search(stages, 3, 4, effort=0.02, quiet=True, split_backward=True)
    result = fxsched.simulate(found, stages, None)
    check(result, stages)
    others = [
        fxsched.schedules.graph(3, 4),
        fxsched.schedules.ddp(3, 3),
        Schedule(3, 4, w=lambda s, b, d: (s % 3, s % 3)),
    ]
    steps = [fxsched.simulate(other, stages, None).latency for other in others[::2]]
    assert result.latency <= min(steps)


def test_orders_are_replayed_and_filled_as_the_event_loop_runs_them() -> None:
    draw = random.Random(8)
    for _ in range(60):
        count = draw.randint(2, 5)
        edges = [(a, b) for b in range(count) for a in range(b) if draw.random() < 0.5]
        joint = {s for s in range(count) if draw.random() < 0.5}
        stages = graph([*edges, (count - 2, count - 1)], joint)
        for _, data in stages.nodes(data=True):
            data.update(held=1.0, weights=0.0)
        check_filled(stages, [draw.randrange(2) for _ in range(count)])


def check_filled(stages: nx.DiGraph[int], places: Sequence[int]) -> None:
    schedule = Schedule(
        2, 3, len(places), lambda s, b, d: (places[s],) * 2, split_backward=True
    )
    problem = make_problem(schedule, stages, 0.5, 1.0, inf)
    assert problem is not None
    orders = fill(problem, Knobs())
    assert orders is not None
    table = ranks(problem, orders)
    strict = replace(schedule, n=lambda s, b, d: table[s, b, d], in_order=True)
    result = fxsched.simulate(strict, stages, None, 0.5)
    check(result, stages)
    times = replay(problem, orders)
    assert times is not None and result.latency == max(times.end)
    started = result.timeline.order
    assert orders == tuple(
        tuple(j for j in started if problem.jobs.worker[j] == worker)
        for worker in range(2)
    )


def test_stages_that_read_a_joint_one_may_have_smaller_numbers() -> None:
    """As plans number them, so that w and n of microbatches' stages stay the same."""
    stages = graph([(0, 3), (3, 1), (1, 2)], {3})
    for schedule in (fxsched.schedules.graph(2, 4), fxsched.schedules.zb_h1(4, 4)):
        check(fxsched.simulate(schedule, stages, None), stages)
    chain = graph([(0, 1), (1, 2), (2, 3)], {1})
    one, other = (fxsched.schedules.graph(4, 4).fitted(s) for s in (stages, chain))
    assert (
        fxsched.simulate(one, stages, None).latency
        == fxsched.simulate(other, chain, None).latency
    )
    for wrong in ([(1, 0)], [(0, 2), (2, 1), (1, 0)], [(2, 2)]):
        with pytest.raises(PlanError, match="number the stages in the order"):
            fxsched.simulate(Schedule(1, 2), graph([*wrong, (0, 2)], {2}), None)


def test_lifted_caps_are_said() -> None:
    stages = nx.path_graph(5, nx.DiGraph)
    stages = graph(stages.edges, {3})
    lines = (
        joint_text(fit_joint(make(5, 8), stages), stages)
        for make in (fxsched.schedules.one_f_one_b, fxsched.schedules.gpipe)
    )
    start = "3*: one job a direction, where the rows of all microbatches meet"
    assert list(lines) == [
        (f"{start}; B waits for F of all, so in_flight is lifted for stages 0..2",),
        (start,),
    ]
    assert joint_text(Schedule(1, 1), nx.path_graph(2, nx.DiGraph)) == ()
