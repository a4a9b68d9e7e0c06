"""The library of schedules against what is known of each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import networkx as nx
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
from fxsched.clock.worker_stats import Worker

from . import table1

FORWARD, BACKWARD, WEIGHT, _ = Direction
# equal shares of microbatches
WHOLE = (
    "ddp",
    "fsdp",
    "hsdp",
    "zero1",
    "zero2",
    "sharded_groups",
    "hybrid",
    "local_sgd",
    "interleaved",
)
ONES = {"F": 1, "B": 1, "W": 1}
# F and B where B is whole; F, B and W where it is split
TIMES = (((1, 2), (1, 1, 1)), ((2, 1), (1, 3, 0.5)), ((0.5, 0.5), (0.3, 1, 2)))


def library(name: str, workers: int, microbatches: int) -> Schedule:
    """A schedule of the library near these sizes."""
    make = schedules.LIBRARY[name]
    given = {"workers": workers, "microbatches": microbatches}
    if name in WHOLE or name.endswith("server"):
        given["microbatches"] *= workers
    if name.endswith("server"):
        given["workers"] += inspect.signature(make).parameters["servers"].default
    if name == "overflow":
        given["workers"] += 1
    if name in ("pipedream_2bw", "stale_by_one"):
        given["microbatches"] *= workers
    if name == "local_sgd":
        given["every"] = 1
    if "group_size" in inspect.signature(make).parameters:
        given["group_size"] = workers if workers % 2 else workers // 2
    return make(**given)


def stages_of(schedule: Schedule) -> int:
    return schedule.stages or schedule.workers + 1


def run(schedule: Schedule, times: tuple[float, ...], transfer: float) -> Simulation:
    durations = dict(zip("FBW", times, strict=False))
    return simulate(schedule, stages_of(schedule), durations, transfer)


def held(ran: Simulation) -> list[int]:
    return [worker.peak_activations for worker in ran.workers]


def kept(ran: Simulation) -> list[int]:
    return [worker.weights_held for worker in ran.workers]


def inside(ran: Simulation) -> list[Worker]:
    """The workers without what copies send to each other: gradients, new weights."""
    return [
        replace(worker, gradients_returned=0, weights_renewed=0)
        for worker in ran.workers
    ]


def every(name: str) -> Iterator[Schedule]:
    """A schedule of the library in many sizes, odd and small ones too."""
    sizes = (1, 2, 3, 4, 5, 8) if name != "graph" else (2, 3, 5)
    for workers in sizes:
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
    known |= {"asynchronous", "staleness", "elastic"}
    assert set(takes) <= known


# -- whole microbatches on a worker ---------------------------------------------------


def test_a_worker_of_ddp_runs_its_microbatches_one_by_one() -> None:
    ran = simulate(schedules.ddp(2, 8), stages=16)
    assert held(ran) == [16, 16] and kept(ran) == [16, 16]
    assert ran.latency == 4 * 16 * 3


def test_hsdp_shards_inside_groups_and_replicates_across() -> None:
    ran = simulate(schedules.hsdp(8, 4), stages=8)
    assert kept(ran) == [2] * 8
    assert [w.weight_transmissions for w in ran.workers] == [12] * 8
    workers = {schedules.hsdp(8, 4).w(s, 5, FORWARD) for s in range(8)}
    assert workers == {(w, 6) for w in range(4, 8)}  # microbatch 5: group 1, there 2


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_zero_deals_out_stages_in_turns_or_by_their_bytes(name: str) -> None:
    schedule = library(name, 4, 1)
    assert [schedule.updater(s) for s in range(6)] == [0, 1, 2, 3, 0, 1]
    sizes = (2, 9, 1, 5, 3, 4)
    stages: nx.DiGraph[int] = nx.path_graph(6, nx.DiGraph)
    nx.set_node_attributes(stages, dict(enumerate(sizes)), "weights")
    fitted = schedule.fitted(stages)
    # 9, 5, 4, 3 to workers 0 to 3, then 2 and 1 to those that have least
    assert [fitted.updater(s) for s in range(6)] == [3, 0, 2, 1, 3, 2]


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_zero_has_as_much_to_send_as_ddp(name: str) -> None:
    stages: nx.DiGraph[int] = nx.path_graph(8, nx.DiGraph)
    nx.set_node_attributes(stages, 40, "weights")
    ddp, zero = (
        simulate(replace(make(4, 8), update_every=every), stages)
        for make, every in ((schedules.ddp, None), (schedules.LIBRARY[name], 8))
    )
    # of each stage 3 sums come to one worker, and from it go 3 totals, or new weights
    assert [w.parameter_bytes for w in ddp.workers] == [2 * 3 * 20 + 6 * 20] * 4
    assert [w.parameter_bytes for w in zero.workers] == [2 * 3 * 20 + 6 * 20] * 4
    assert [w.gradients_returned for w in zero.workers] == [6] * 4
    assert [w.weights_renewed for w in zero.workers] == [6] * 4
    assert [w.weights_renewed for w in ddp.workers] == [0] * 4


def order_of(schedule: Schedule, worker: int) -> str:
    """A worker's jobs in three stages, with a step of the optimizer at the end."""
    every = replace(schedule, update_every=schedule.microbatches)
    ran = simulate(every, 3)
    return " ".join(str(e.job) for e in ran.timeline if e.worker == worker)


def test_zero1_updates_in_the_end_and_zero2_as_soon_as_a_stage_is_done() -> None:
    zero1, zero2 = (make(2, 2) for make in (schedules.zero1, schedules.zero2))
    assert order_of(zero1, 0) == "0F0 1F0 2F0 2B0 1B0 0B0 2U1 0U1"
    assert order_of(zero2, 0) == "0F0 1F0 2F0 2B0 2U1 1B0 0B0 0U1"


def test_sharded_groups_serve_across_groups_and_replicate_inside() -> None:
    schedule = schedules.sharded_groups(8, 4)
    ran = simulate(schedule, stages=8)
    assert kept(ran) == [4] * 8
    assert [w.weight_transmissions for w in ran.workers] == [8] * 8
    assert schedule.w(1, 2, FORWARD) == Placement(weights=6, compute=2)


def test_sharded_groups_lie_between_fsdp_and_ddp() -> None:
    jobs = [(s, b, FORWARD) for s in range(9) for b in range(4)]
    sharded, replicas = schedules.sharded_groups(4, 1), schedules.sharded_groups(4, 4)
    assert [sharded.w(*job) for job in jobs] == [schedules.fsdp(4).w(*j) for j in jobs]
    assert [replicas.w(*job) for job in jobs] == [schedules.ddp(4).w(*j) for j in jobs]


def test_hybrid_keeps_sparse_stages_on_servers_and_the_rest_on_trainers() -> None:
    with_servers = schedules.hybrid(5, sparse=(0, 3), servers=2)
    assert with_servers.w(0, 4, FORWARD) == Placement(weights=3, compute=1)
    assert with_servers.w(3, 4, FORWARD) == Placement(weights=4, compute=1)
    assert with_servers.w(1, 4, FORWARD) == Placement(weights=1, compute=1)
    by_trainers = schedules.hybrid(2, 4, sparse=(1, 2))
    assert [by_trainers.w(s, 3, FORWARD).weights for s in range(4)] == [1, 0, 1, 1]
    ran = simulate(schedules.hybrid(4, sparse=(0,)), stages=6)
    assert [w.weight_transmissions for w in ran.workers] == [0, 2, 2, 2]
    jobs = [(s, b, FORWARD) for s in range(9) for b in range(4)]
    dense = schedules.hybrid(4, sparse=())
    assert [dense.w(*job) for job in jobs] == [schedules.ddp(4).w(*j) for j in jobs]


@pytest.mark.parametrize(
    ("servers", "each"), [(1, [6]), (2, [3, 3]), (4, [2, 2, 1, 1])]
)
def test_servers_keep_all_weights_and_run_nothing(
    servers: int, each: list[int]
) -> None:
    schedule = schedules.parameter_server(3 + servers, 6, servers)
    ran = simulate(schedule, stages=6)
    assert kept(ran) == [0] * 3 + each
    assert [w.busy for w in ran.workers] == [36] * 3 + [0] * servers
    assert [w.weight_transmissions for w in ran.workers[:3]] == [24] * 3
    assert [w.gradients_returned for w in ran.workers[:3]] == [6] * 3


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


# -- replicas -------------------------------------------------------------------------


def test_replicas_deal_out_microbatches_in_turns() -> None:
    copies = schedules.replicate(schedules.gpipe(2, 3), 2)
    places = [copies.place(Job(1, b, FORWARD)).compute for b in range(6)]
    assert places == [1, 3, 1, 3, 1, 3]
    assert [copies.n(0, b, BACKWARD) for b in range(6)] == [3, 3, 4, 4, 5, 5]


def test_replicas_of_a_schedule_that_fits_stages_fit_them_too() -> None:
    tree: nx.DiGraph[int] = nx.DiGraph([(0, 2), (1, 2)])
    one = simulate(schedules.graph(3, 4), tree)
    two = simulate(schedules.replicate(schedules.graph(3, 4), 2), tree)
    assert two.latency == one.latency and inside(two) == inside(one) * 2


def test_replicas_of_replicas() -> None:
    twice = schedules.replicate(schedules.replicate(schedules.zb_v(2, 4), 2), 3)
    assert (twice.workers, twice.microbatches) == (12, 24)
    assert twice.split_backward and simulate(twice).latency == (
        simulate(schedules.zb_v(2, 4)).latency
    )


@pytest.mark.parametrize("zero", [1, 2])
def test_replicas_share_the_optimizer_of_a_worker_of_the_pipeline(zero: int) -> None:
    copies = schedules.replicate(schedules.interleaved(2, 4), 2, zero)
    # stages 0 and 2 are on workers 0 and 2, stages 1 and 3 on workers 1 and 3
    assert [copies.updater(s) for s in range(4)] == [0, 1, 2, 3]
    stages: nx.DiGraph[int] = nx.path_graph(4, nx.DiGraph)
    nx.set_node_attributes(stages, {0: 1, 1: 1, 2: 2, 3: 2}, "weights")
    assert [copies.fitted(stages).updater(s) for s in range(4)] == [2, 3, 0, 1]
    last = copies.n(0, 7, Direction.UPDATE)
    assert (last > 1 << 59) is (zero == 1)


def test_rows_of_workers_that_share_the_optimizer_are_those_of_ddp() -> None:
    schedule = schedules.zero2(4, 8)
    assert schedule.local_microbatches(1) == (1, 5)
    assert schedules.graph(4, 8).local_microbatches(1) == tuple(range(8))
    copies = schedules.replicate(schedules.graph(2, 4), 2, zero=1)
    assert copies.local_microbatches(1) == tuple(range(8))


def test_a_worker_outside_its_copy_is_an_error() -> None:
    beyond = Schedule(2, 2, w=lambda s, b, d: (0, 2))
    with pytest.raises(PlanError, match=r"runs on worker 2, but workers are 0\.\.1"):
        simulate(schedules.replicate(beyond, 2))


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
        (lambda: schedules.ddp(4, 6), r"ddp\(workers=4, microbatches=6\): give a mult"),
        (lambda: schedules.hsdp(6, 4), r"hsdp\(workers=6, group_size=4\): the workers"),
        (lambda: schedules.hsdp(4, 2, 6), r"hsdp\(workers=4, microbatches=6\): give a"),
        (
            lambda: schedules.sharded_groups(4, 3),
            r"sharded_groups\(workers=4, group_size=3\): the work",
        ),
        (
            lambda: schedules.sharded_groups(4, 2, 3),
            r"sharded_groups\(workers=4, microbatches=3\): ",
        ),
        (
            lambda: schedules.hybrid(2, servers=2),
            r"hybrid\(workers=2, servers=2\): ser",
        ),
        (lambda: schedules.hybrid(2, sparse=0), r"hybrid\(sparse=0\): give numbers of"),
        (
            lambda: schedules.parameter_server(1),
            r"parameter_server\(workers=1, servers=1\): servers run no jobs, so",
        ),
        (
            lambda: schedules.parameter_server(4, 4),
            r"microbatches=4, servers=1\): 3 workers train; give a multiple of that",
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
            r"overflow\(workers=4, stages=4\): each stage has a worker and one or more",
        ),
        (
            lambda: schedules.looped_bfs(4, 4, 6),
            r"looped_bfs\(workers=4, stages=6\): give a multiple of workers, so that",
        ),
        (
            lambda: schedules.looped_dfs(4, 0),
            r"looped_dfs\(microbatches=0\): give an i",
        ),
        (
            lambda: schedules.interleaved(4, 6),
            r"interleaved\(workers=4, microbatches=6\): give a multiple of workers",
        ),
        (
            lambda: schedules.lpp(4, 3, 4),
            r"lpp\(workers=4, group_size=3\): the workers",
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
            r"replicate\(zero=3\): give None or 1 or 2",
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
