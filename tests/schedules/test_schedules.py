"""The library of schedules against what is known of each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest

from fxsched import (
    Direction,
    Job,
    Placement,
    PlanError,
    Schedule,
    Simulation,
    schedules,
    simulate,
)

from .. import table1
from ..simulated import held, inside, kept, library, run, stages_of

FORWARD, BACKWARD, WEIGHT, _ = Direction
ONES = {"F": 1, "B": 1, "W": 1}
# of schedules that simulate to fit their stages
FEWER = {"graph": (2, 3, 5), "bubble_filled": (2, 3), "nested": (2, 3)}
# F and B where B is whole; F, B and W where it is split
TIMES = (((1, 2), (1, 1, 1)), ((2, 1), (1, 3, 0.5)), ((0.5, 0.5), (0.3, 1, 2)))


def every(name: str) -> Iterator[Schedule]:
    """A schedule of the library in many sizes, odd and small ones too."""
    for workers in FEWER.get(name, (1, 2, 3, 4, 5, 8)):
        for microbatches in (1, 2, 3, 5, 8, 13):
            yield library(name, workers, microbatches)


# -- all of the library ---------------------------------------------------------------


@pytest.mark.parametrize("name", schedules.LIBRARY)
def test_no_schedule_gets_stuck_or_breaks_the_bound(name: str) -> None:
    for schedule in every(name):
        for (whole, split), transfer in zip(TIMES, (0, 0.7, 0), strict=True):
            times = split if schedule.split_backward else whole
            ran = run(schedule, times, transfer)
            most = table1.most_throughput(max(held(ran)), stages_of(schedule), times)
            assert 1 - ran.bubble_rate <= most + 1e-9, (str(schedule), times)


@pytest.mark.parametrize("name", schedules.LIBRARY)
def test_replicas_do_what_one_copy_does(name: str) -> None:
    schedule = library(name, 4, 3)
    copies = schedules.replicate(schedule, 3)
    assert copies.workers == 3 * schedule.workers
    assert copies.microbatches == 3 * schedule.microbatches
    times = TIMES[0][schedule.split_backward]
    stages = stages_of(schedule)
    one = run(replace(schedule, stages=stages), times, 0.5)
    three = run(replace(copies, stages=stages), times, 0.5)
    assert three.latency == one.latency
    assert inside(three) == inside(one) * 3


@pytest.mark.parametrize("name", schedules.LIBRARY)
def test_a_schedule_says_its_name_and_how_it_is_called(name: str) -> None:
    assert library(name, 4, 4).name == name
    takes = inspect.signature(schedules.LIBRARY[name]).parameters
    assert next(iter(takes)) == "workers" and "microbatches" in takes
    known = {"workers", "microbatches", "group_size", "stages", "servers"}
    known |= {"held", "even", "ahead", "every", "sparse", "annealed", "correction"}
    known |= {"asynchronous", "staleness", "elastic", "outer", "split_backward"}
    assert set(takes) <= known


# -- pipelines ------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [8, 16])
def test_1f1b_holds_distance_to_the_end_at_the_latency_of_gpipe(stages: int) -> None:
    ran = simulate(schedules.one_f_one_b(stages, 64))
    gpipe = simulate(schedules.gpipe(stages, 64))
    assert held(ran) == list(range(stages, 0, -1))
    assert held(gpipe) == [64] * stages
    assert ran.latency == gpipe.latency == 3 * (64 + stages - 1)


def test_1f1b_ahead_hides_transfers() -> None:
    """Eager-1F1B: F = B = 1 and a transfer half as long leave a worker no wait."""
    times = {"F": 1, "B": 1}
    plain, ahead = (
        simulate(schedules.one_f_one_b(4, 64, k), durations=times, transfer=0.5)
        for k in (1, 2)
    )
    assert held(plain) == [4, 3, 2, 1] and held(ahead) == [7, 5, 3, 1]
    fill = 3 * (1 + 1 + 2 * 0.5)  # the first worker's F to the last, and B back
    assert ahead.latency == 2 * 64 + fill < 0.8 * plain.latency
    assert schedules.one_f_one_b(4, 64, 2).name == "1f1b"


def test_naive_runs_one_worker_at_a_time() -> None:
    ran = simulate(schedules.naive(4, 3))
    assert ran.latency == 3 * 4 * 3 and held(ran) == [1] * 4
    assert simulate(schedules.naive(4)).latency == 4 * 3


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_folded_holds_as_much_on_every_worker_and_has_less_bubble(workers: int) -> None:
    ran = simulate(schedules.folded(workers, 8 * workers))
    assert held(ran) == [2 * workers + 1] * workers
    twice = {"F": 2, "B": 4}  # 1f1b of the same model has stages twice as large
    plain = simulate(schedules.one_f_one_b(workers, 8 * workers), durations=twice)
    assert ran.latency < plain.latency


@pytest.mark.parametrize("room", [2, 3, 5, 8, 12])
def test_folded_keeps_to_the_room_given(room: int) -> None:
    assert max(held(simulate(schedules.folded(6, 32, held=room)))) == room


def test_cuckoo_does_what_the_notebook_shows() -> None:
    ran = simulate(schedules.cuckoo(6, 12))
    assert ran.latency == 59
    assert held(ran) == [8, 8, 8, 8, 7, 5]
    assert [w.weight_transmissions for w in ran.workers] == [0, 4, 4, 4, 4, 4]


@pytest.mark.parametrize(("workers", "stages"), [(6, 4), (9, 6), (12, 8)])
def test_overflow_takes_as_long_as_1f1b_in_half_the_room(
    workers: int, stages: int
) -> None:
    ran = simulate(schedules.overflow(workers, 64, stages))
    assert ran.latency == 3 * (64 + stages - 1)
    assert max(held(ran)) == stages // 2
    assert sum(w.busy for w in ran.workers[stages:]) > 0


def test_a_single_extra_worker_relieves_the_first() -> None:
    ran = simulate(schedules.overflow(8, 64, stages=7))
    assert held(ran) == [5, 5, 5, 4, 3, 2, 1, 4]


# -- loops ----------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "loops"), [(2, 2), (4, 2), (4, 3), (8, 4)])
def test_loops_divide_the_bubble(workers: int, loops: int) -> None:
    count, stages = 4 * workers, loops * workers
    least = 3 * (count * loops + workers - 1)
    breadth = simulate(schedules.looped_bfs(workers, count, stages))
    fixed = simulate(schedules.interleaved(workers, count, stages))
    depth = simulate(schedules.looped_dfs(workers, count, stages))
    assert breadth.latency == fixed.latency == least
    assert least <= depth.latency <= 1.04 * least
    assert held(breadth)[0] == count * loops
    assert held(fixed) == [
        2 * (workers - r - 1) + (loops - 1) * workers + 1 for r in range(workers)
    ]


def test_depth_first_holds_no_more_for_more_microbatches() -> None:
    few, many = (simulate(schedules.looped_dfs(4, m, 12)) for m in (16, 64))
    assert held(few) == held(many) and max(held(few)) == 20


def test_breadth_first_fetches_weights_once_a_loop() -> None:
    breadth = schedules.looped_bfs(4, 8, 12)

    def away(s: int, b: int, d: Direction) -> Placement:
        return Placement((s + 1) % 4, s % 4)

    fetched = {
        name: simulate(replace(schedule, w=away)).workers[0].weight_fetches
        for name, schedule in (
            ("breadth", breadth),
            ("depth", schedules.interleaved(4, 8, 12)),
        )
    }
    assert fetched["breadth"] == 2 * 3 - 1  # the last F and the first B share them
    assert fetched["depth"] > 2 * fetched["breadth"]


def test_lpp_places_as_copies_of_one_looped_pipeline() -> None:
    lpp = schedules.lpp(8, 4, 6, stages=12)
    copies = schedules.replicate(schedules.looped_bfs(4, 3, stages=12), 2)
    for s in range(12):
        for b in range(6):
            assert lpp.w(s, b, FORWARD) == copies.w(s, b, FORWARD)


def test_fslpp_keeps_weights_unevenly_unless_asked() -> None:
    published = simulate(schedules.fslpp(8, 4, 8, stages=8))
    even = simulate(schedules.fslpp(8, 4, 8, stages=8, even=True))
    assert kept(published) == [2, 0, 2, 0, 0, 2, 0, 2]
    assert kept(even) == [1] * 8


# -- zero bubble ----------------------------------------------------------------------


@pytest.mark.parametrize("workers", [4, 8])
def test_zb_h1_and_h2_hold_what_is_published(workers: int) -> None:
    count = 4 * workers
    first = simulate(schedules.zb_h1(workers, count), durations=ONES)
    second = simulate(schedules.zb_h2(workers, count), durations=ONES)
    assert held(first) == [workers] * workers
    assert held(second) == [2 * workers - 1] * workers
    assert first.latency == 3 * count + workers - 1  # 1f1b: 3 count + 3 (workers - 1)
    assert second.span == 3 * count and second.span_bubble_rate == 0


@cache
def of_v(name: str, workers: int, microbatches: int) -> Simulation:
    return simulate(schedules.LIBRARY[name](workers, microbatches), durations=ONES)


COUNTS: tuple[Callable[[int], int], ...] = (
    lambda p: 2 * p,
    lambda p: 3 * p + 1,
    lambda p: 64,
)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("p", [4, 8, 16])
def test_v_schedules_hold_what_is_published(
    p: int, count: Callable[[int], int]
) -> None:
    m = count(p)
    halves = {"zb_v": p, "v_half": (p + 2) // 2, "v_min": (p + 4) // 3}
    assert {name: max(held(of_v(name, p, m))) for name in halves} == {
        name: 2 * microbatches for name, microbatches in halves.items()
    }


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("p", [4, 8, 16])
def test_v_schedules_have_the_bubbles_published(
    p: int, count: Callable[[int], int]
) -> None:
    m = count(p)
    bubble = {
        name: of_v(name, p, m).latency - 6 * m for name in ("zb_v", "v_half", "v_min")
    }
    assert p - 1 <= bubble["zb_v"] < 1.5 * p  # the last worker can start at p - 1
    assert bubble["v_half"] < 3 * p
    assert bubble["v_min"] < 4 * p  # 1f1b has 6 (p - 1)
    assert of_v("zb_v", p, m).span - 6 * m < 1.5 * p


@pytest.mark.parametrize("p", range(1, 20))
def test_blocks_of_v_schedules_repeat_for_any_number_of_workers(p: int) -> None:
    for name, room in (("v_half", 2 * ((p + 2) // 2)), ("v_min", 2 * ((p + 4) // 3))):
        assert max(held(of_v(name, p, 24))) == min(room, 48)


def test_v_min_holds_close_to_the_least_possible() -> None:
    ran = of_v("v_min", 16, 64)
    least = (1 - ran.bubble_rate) / table1.most_throughput(1, 32, (1, 1, 1))
    assert max(held(ran)) <= least + 3


# -- orders ---------------------------------------------------------------------------


def test_oldest_stage_first_follows_what_made_a_job_ready() -> None:
    n = schedules.oldest_stage_first(3, 2)
    jobs = [Job(s, b, d) for d in (FORWARD, BACKWARD) for s in range(3) for b in (0, 1)]
    jobs.sort(key=lambda job: n(*job))
    assert " ".join(map(str, jobs)) == "0F0 0F1 1F0 1F1 2F0 2F1 0B0 0B1 2B0 2B1 1B0 1B1"


# -- errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.ddp(4, 6), r"ddp\(workers=4, microbatches=6\): give microb"),
        (lambda: schedules.hsdp(6, 4), r"hsdp\(workers=6, group_size=4\): give group"),
        (lambda: schedules.hsdp(4, 2, 6), r"hsdp\(workers=4, microbatches=6\): give m"),
        (
            lambda: schedules.sharded_groups(4, 3),
            r"sharded_groups\(workers=4, group_size=3\): give group_size=1, 2 or 4, a",
        ),
        (
            lambda: schedules.sharded_groups(4, 2, 3),
            r"sharded_groups\(workers=4, microbatches=3\): ",
        ),
        (
            lambda: schedules.hybrid(2, servers=2),
            r"hybrid\(workers=2, servers=2\): give workers=3 or more",
        ),
        (lambda: schedules.hybrid(2, sparse=0), r"hybrid\(sparse=0\): give numbers of"),
        (
            lambda: schedules.parameter_server(1),
            r"parameter_server\(workers=1, servers=1\): give workers=2 or more, bec",
        ),
        (
            lambda: schedules.parameter_server(4, 4),
            r"microbatches=4, servers=1\): give microbatches=3 or 6, or another multi",
        ),
        (
            lambda: schedules.sharded_parameter_server(4, 4, 0),
            r"sharded_parameter_server\(servers=0\): give an int of 1 or more",
        ),
        (lambda: schedules.naive(0), r"naive\(workers=0\): give an int of 1 or more"),
        (lambda: schedules.gpipe(2, 0), r"gpipe\(microbatches=0\): give an int of 1"),
        (lambda: schedules.one_f_one_b(2.0, 1), r"one_f_one_b\(workers=2\.0\): give"),  # type: ignore[arg-type]
        (
            lambda: schedules.folded(2, True),
            r"folded\(microbatches=True\): give an int",
        ),
        (
            lambda: schedules.folded(2, 4, 1),
            r"folded\(held=1\): give an int of 2 or mo",
        ),
        (lambda: schedules.cuckoo(2, -1), r"cuckoo\(microbatches=-1\): give an int of"),
        (
            lambda: schedules.overflow(4, 4, 4),
            r"overflow\(workers=4, stages=4\): give workers=5 or more, one for each st",
        ),
        (
            lambda: schedules.looped_bfs(4, 4, 6),
            r"looped_bfs\(workers=4, stages=6\): give stages=4 or 8, or another multip",
        ),
        (
            lambda: schedules.looped_dfs(4, 0),
            r"looped_dfs\(microbatches=0\): give an i",
        ),
        (
            lambda: schedules.interleaved(4, 6),
            r"interleaved\(workers=4, microbatches=6\): give microbatches=4 or 8, or",
        ),
        (
            lambda: schedules.local_sgd(4, 2, 4),
            r"local_sgd\(workers=4, every=2, microbatches=4\): give microbatches=8, or",
        ),
        (
            lambda: schedules.stale_by_one(4, 6),
            r"stale_by_one\(workers=4, microbatches=6\): give microbatches=4 or 8, or",
        ),
        (
            lambda: schedules.fslpp(4, 2, 4, even=1),  # type: ignore[arg-type]
            r"fslpp\(even=1\): give True or False",
        ),
        (
            lambda: schedules.lpp(4, 2, 4, 0),
            r"lpp\(stages=0\): give an int of 1 or mor",
        ),
        (
            lambda: schedules.fslpp(4, 2, 0),
            r"fslpp\(microbatches=0\): give an int of 1",
        ),
        (
            lambda: schedules.zb_h1(0, 4),
            r"zb_h1\(workers=0\): give an int of 1 or more",
        ),
        (
            lambda: schedules.zb_h2(4, 0),
            r"zb_h2\(microbatches=0\): give an int of 1 or",
        ),
        (lambda: schedules.zb_v(0, 4), r"zb_v\(workers=0\): give an int of 1 or more"),
        (
            lambda: schedules.v_half(0, 4),
            r"v_half\(workers=0\): give an int of 1 or mo",
        ),
        (lambda: schedules.v_min("2", 4), r"v_min\(workers='2'\): give an int of 1 or"),  # type: ignore[arg-type]
        (
            lambda: schedules.graph(2, 0),
            r"graph\(microbatches=0\): give an int of 1 or",
        ),
        (
            lambda: schedules.replicate(schedules.ddp(2), 0),
            r"replicate\(groups=0\): give an int of 1 or more",
        ),
        (
            lambda: schedules.replicate(schedules.ddp(2), 2, zero=3),
            r"replicate\(zero=3\): give None, 1 or 2",
        ),
        (
            lambda: schedules.replicate("ddp", 2),  # type: ignore[arg-type]
            r"replicate\(schedule='ddp'\): give a Schedule",
        ),
    ],
)
def test_a_bad_argument_says_what_is_allowed(
    make: Callable[[], Schedule], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        make()
