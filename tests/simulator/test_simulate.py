"""The simulator: its arithmetic on small cases, and what threads really do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import networkx as nx
import pytest
import torch
from torch import fx

import fxsched
from fxsched import Direction, Job, Link, PlanError, Schedule, schedules, simulate
from fxsched.ir import ops
from fxsched.plans.plan import Plan
from fxsched.transport.endpoints import ThreadEndpoint
from fxsched.transport.wire_format import Parcel
from tests.cases import apart, build

FORWARD, BACKWARD, WEIGHT, _ = Direction


def alone(microbatches: int = 1, **options: object) -> Schedule:
    """One worker, one stage."""
    return Schedule(1, microbatches, stages=1, **options)


def pair(**data: float) -> nx.DiGraph[int]:
    """Two stages in a chain: 10 bytes go along the edge, 20 are the weights of each."""
    stages: nx.DiGraph[int] = nx.DiGraph()
    for s in range(2):
        stages.add_node(s, forward=1.0, backward=2.0, weights=40, held=5)
    stages.add_edge(0, 1, bytes=10, **data)
    return stages


def split(**options: object) -> Schedule:
    """Two stages on a worker each, W last."""
    return Schedule(
        2,
        2,
        stages=2,
        w=lambda s, b, d: (s, s),
        n=lambda s, b, d: b + 10 * (d is WEIGHT),
        split_backward=True,
        **options,
    )


def test_latency_busy_bubble_and_throughput_of_a_small_pipeline() -> None:
    found = simulate(schedules.gpipe(2, 2))
    assert found.latency == 9
    assert [worker.busy for worker in found.workers] == [6, 6]
    assert found.bubble_rate == pytest.approx(1 - 12 / 18)
    assert found.throughput == pytest.approx(8 / 9 / 2)
    assert [str(e.job) for e in found.timeline if e.worker == 1] == [
        "1F0",
        "1F1",
        "1B0",
        "1B1",
    ]


def test_a_split_backward_runs_weight_gradients_where_there_is_room() -> None:
    found = simulate(split(), durations={"F": 1, "B": 1, "W": 1})
    assert " ".join(str(e.job) for e in found.timeline) == (
        "0F0 0F1 1F0 1B0 0B0 1F1 0W0 1B1 0B1 1W0 0W1 1W1"
    )
    assert found.latency == 7
    assert simulate(split(), durations={"F": 1, "B": 2}).latency == 7


def test_activations_are_held_until_weight_gradients_are_done() -> None:
    late = simulate(split(), durations={"F": 1, "B": 1, "W": 1})
    assert [worker.peak_activations for worker in late.workers] == [2, 2]
    capped = simulate(split(in_flight=1))
    assert [worker.peak_activations for worker in capped.workers] == [1, 1]


def test_in_order_a_worker_waits_for_its_next_job() -> None:
    greedy = Schedule(2, 2, 2, w=lambda s, b, d: (s, s), n=lambda s, b, d: b)
    strict = replace(greedy, in_order=True)
    first = [str(e.job) for e in simulate(greedy).timeline if e.worker == 0]
    assert first == ["0F0", "0F1", "0B0", "0B1"]
    first = [str(e.job) for e in simulate(strict).timeline if e.worker == 0]
    assert first == ["0F0", "0B0", "0F1", "0B1"]


def test_a_function_gives_each_job_its_time() -> None:
    found = simulate(alone(3), durations=lambda job: 1.0 + job.microbatch)
    assert found.latency == 12
    assert [e.end - e.start for e in found.timeline if e.job.microbatch == 2] == [3, 3]


def test_measured_events_give_the_median_of_each_stage_and_direction() -> None:
    measured = simulate(alone(3), durations=lambda job: 1.0 + job.microbatch).timeline
    assert simulate(alone(5), durations=measured).latency == 5 * (2 + 2)


def test_a_transfer_delays_the_reader_on_another_worker_only() -> None:
    assert simulate(schedules.gpipe(2, 1), transfer=5).latency == 6 + 10
    assert simulate(alone(), transfer=5).latency == 3


def test_messages_take_turns_on_a_link() -> None:
    schedule = schedules.gpipe(2, 2)
    # 0F0 ends at 1, 0F1 at 2; each takes 10 on the link from 0 to 1: there at 11, 21
    found = simulate(schedule, pair(), None, Link(bandwidth=1))
    start = {str(e.job): e.start for e in found.timeline}
    assert (start["1F0"], start["1F1"]) == (11, 21)
    found = simulate(schedule, pair(), None, Link(bandwidth=1, latency=3))
    start = {str(e.job): e.start for e in found.timeline}
    assert (start["1F0"], start["1F1"]) == (14, 24)


def test_the_edges_have_seconds() -> None:
    assert simulate(schedules.gpipe(2, 1), pair(seconds=4.0), None, None).latency == 14


@pytest.mark.parametrize(
    ("prefetch", "start"),
    [
        (0, {"0F0": 20, "0B0": 41, "0F1": 63, "0B1": 84}),
        (1, {"0F0": 20, "0B0": 21, "0F1": 41, "0B1": 43}),
    ],
)
def test_weights_are_asked_for_ahead_of_need(
    prefetch: int, start: dict[str, float]
) -> None:
    # the weights, of which 20 bytes go, are dropped after each job: another stage runs
    # between (here nothing does, but w names another keeper each time)
    schedule = Schedule(
        3,
        2,
        stages=1,
        w=lambda s, b, d: (1 + (d is BACKWARD), 0),
        n=lambda s, b, d: 2 * b + (d is BACKWARD),
    )
    stages: nx.DiGraph[int] = nx.DiGraph()
    stages.add_node(0, forward=1.0, backward=2.0, weights=40)
    found = simulate(schedule, stages, None, Link(bandwidth=1), prefetch)
    assert {str(e.job): e.start for e in found.timeline} == start
    assert found.workers[0].weight_fetches == 4


def test_the_step_ends_when_gradients_are_back() -> None:
    found = simulate(schedules.ddp(2), pair(), None, Link(bandwidth=1), prefetch=1)
    # stage 1's gradients go from worker 0 to 1 at 4, stage 0's from 1 to 0 at 6, both
    # for 20; the sums go back at 26, when stage 0's are there and the link is free
    assert max(e.end for e in found.timeline) == 6
    assert found.latency == 6 + 40
    assert [w.gradients_returned for w in found.workers] == [1, 1]


UPDATING: dict[str, tuple[Schedule, float, dict[str, list[float]]]] = {
    # U waits for the sum from the other worker, and F there for the new weights
    "zero2": (
        schedules.zero2(2, 4),
        21,
        {"1U1": [5], "0U1": [9], "0F2": [10], "0F3": [11]},
    ),
    # each adds up one stage, and sends the other worker the total
    "ddp": (schedules.ddp(2, 4), 18, {"1U1": [6, 6], "0U1": [7, 8], "0F3": [9]}),
    # U waits for the sum, and the worker that fetches the weights for U
    "fsdp": (
        schedules.fsdp(2, 4),
        18,
        {"0U1": [8], "1U1": [7], "0F2": [9], "0F3": [10]},
    ),
}


@pytest.mark.parametrize("name", UPDATING)
def test_sums_reach_updates_and_new_weights_those_who_read_them(name: str) -> None:
    schedule, latency, starts = UPDATING[name]
    schedule = replace(schedule, stages=2, update_every=2)
    times = {"F": 1, "B": 2, "U": 1}
    free = simulate(schedule, None, times, 1)
    found = simulate(schedule, None, times, 1, prefetch=1)
    assert free.latency < found.latency == latency
    for job, expected in starts.items():
        events = [e for e in found.timeline if str(e.job) == job]
        assert [e.start for e in sorted(events, key=lambda e: e.worker)] == expected


def test_weights_stay_while_the_next_job_reads_them_too() -> None:
    found = simulate(schedules.fsdp(2), stages=1)
    assert [w.weight_fetches for w in found.workers] == [0, 1]
    assert [w.weight_transmissions for w in found.workers] == [0, 2]


def test_bytes_of_activations_where_stages_say_them() -> None:
    found = simulate(schedules.gpipe(2, 3), pair(), None)
    assert [w.peak_bytes for w in found.workers] == [15, 15]
    assert re.search(r"^ +0\.\.1 +\S+ % +3, 15 B ", found.table(), re.M)
    assert simulate(schedules.gpipe(2, 3)).workers[0].peak_bytes is None


def test_the_table_merges_equal_workers() -> None:
    text = simulate(schedules.fsdp(8), 4).table()
    assert text.startswith("fsdp: 8 workers, 8 microbatches, 4 stages: step 12, bubble")
    assert "0..2" in text and "4..7" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 0}, r"stages=0\): give an int of 1 or more"),
        ({"durations": {"F": 1}}, r"give times of F, B and"),
        ({"durations": {"F": 1, "B": 2, "X": 3}}, r"give times of F, B and"),
        ({"durations": {"F": -1, "B": 2}}, r"F takes -1; give a number, 0 or more"),
        ({"transfer": -1.0}, r"transfer=-1.0\): give a time of 0 or more, a Link"),
        ({"durations": {"F": "a", "B": 1}}, r"F takes 'a'; give a number"),
        ({"durations": None}, r"stage 0 has no `forward` and `backward`"),
        ({"transfer": Link(1)}, r"from 0 to 1 has no `bytes`"),
        ({"prefetch": -1}, r"prefetch=-1.*0 or more"),
    ],
)
def test_a_bad_argument_says_what_is_allowed(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        simulate(schedules.gpipe(2, 2), **options)


def test_stages_must_follow_data_flow() -> None:
    backwards = nx.DiGraph([(1, 0)])
    with pytest.raises(PlanError, match="stage 0 reads stage 1, which has no smaller"):
        simulate(schedules.gpipe(2, 2), backwards)
    with pytest.raises(PlanError, match=r"number the stages from 0"):
        simulate(schedules.gpipe(2, 2), nx.DiGraph([(1, 2)]))


def test_a_cap_that_stops_all_is_an_error() -> None:
    with pytest.raises(PlanError, match="0F0 never runs; allow more microbatches"):
        simulate(alone(in_flight=lambda s: 0))
    wrong = alone(in_order=True, n=lambda s, b, d: -(d is BACKWARD))
    with pytest.raises(PlanError, match="0F0 never runs"):
        simulate(wrong)


def test_a_link_needs_a_bandwidth() -> None:
    with pytest.raises(PlanError, match="give a bandwidth above 0"):
        Link(0)


def zero_bubble() -> Schedule:
    """Four workers, capped; weight gradients when there is nothing else to do."""
    return Schedule(
        4,
        4,
        stages=4,
        w=lambda s, b, d: (s, s),
        n=lambda s, b, d: b + 10 * (d is WEIGHT),
        in_flight=lambda s: 4 - s,
        split_backward=True,
    )


EXACT: dict[str, Callable[[], Schedule]] = {
    "1f1b": lambda: schedules.one_f_one_b(4, 4),
    "fsdp": lambda: schedules.fsdp(4),
    "fslpp": lambda: schedules.fslpp(4, 2, 4, even=True),
    "zero bubble": zero_bubble,
    "apart": apart,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule"),
    [*(("two_tower", each) for each in EXACT), ("gpt", "fsdp"), ("gpt", "zero bubble")],
)
def test_threads_do_what_was_simulated(
    name: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Order, transfers, weight fetches, and, where F and B share a worker, how many
    activations live at once."""
    model, inputs = build(name)
    backend = fxsched.backend(EXACT[schedule](), profile=True)
    step = torch.compile(model, backend=backend)
    sent = Counter[int]()
    original = ThreadEndpoint.send

    def send(self: ThreadEndpoint, value: object, parcel: Parcel) -> None:
        sent[parcel.tag] += 1
        original(self, value, parcel)

    monkeypatch.setattr(ThreadEndpoint, "send", send)
    step(*inputs).backward()
    plan = backend.plan
    assert plan is not None
    found = plan.simulate()
    ran = backend.timeline
    assert len(ran) == len(found.timeline)
    assert sum(sent.values()) == len(sent) == len(readers(plan))
    for worker, record in enumerate(found.workers):
        jobs = [e.job for e in ran if e.worker == worker]
        assert jobs == [e.job for e in found.timeline if e.worker == worker]
        if schedule != "apart":
            assert record.peak_activations == live(jobs, plan.schedule.release)
    messages = [each for each in readers(plan).values() if each[1]]
    for worker, record in enumerate(found.workers):
        assert record.activations_sent == sum(m[0] == worker for m in messages)
        assert record.activations_received == sum(m[2] == worker for m in messages)
        assert record.weight_fetches == fetches(plan.programs[worker])


def readers(plan: Plan) -> dict[int, tuple[int, str, int]]:
    """By tag: who sends, of which job ("" if no job reads it), and to whom."""
    made = {
        node.kwargs["tag"]: str(node.args[0].meta.get("task", ""))
        for program in plan.programs
        for node in program.graph.nodes
        if node.target is ops.send
    }
    found = {}
    for worker, program in enumerate(plan.programs):
        for node in program.graph.nodes:
            if node.target in (ops.recv, ops.fetch):
                tag = node.kwargs["tag"]
                of_job = node.target is ops.recv and any(map(is_read, node.users))
                task = made[tag] if of_job else ""
                found[tag] = (node.kwargs["source"], task, worker)
    return found


def is_read(user: fx.Node) -> bool:
    """Whether a job computes with what it got; credits and sums of gradients aside."""
    if user.op == "call_module":
        return True
    adds = user.target in (ops.add, ops.loss_gradient)
    return adds and any(map(is_read, user.users))


def fetches(program: fx.GraphModule) -> int:
    return sum(node.target is ops.fetch for node in program.graph.nodes)


def live(jobs: list[Job], release: Direction) -> int:
    """The most microbatches of stages between F and the end of `release`."""
    held = most = 0
    for job in jobs:
        held += job.direction is FORWARD
        most = max(most, held)
        held -= job.direction is release
    return most


def test_a_plan_is_simulated_with_other_durations() -> None:
    model, inputs = build("mlp")
    plan = fxsched.plan(model, schedules.gpipe(4, 4), *inputs)
    assert plan.simulate().latency == pytest.approx(max(plan.timeline.end))
    units = plan.simulate({"F": 1, "B": 2}, transfer=0)
    assert units.latency == simulate(schedules.gpipe(4, 4)).latency
    again = plan.simulate(units.timeline, transfer=0)
    assert list(again.timeline) == list(units.timeline)


@pytest.mark.slow
def test_a_plan_keeps_its_cap_where_room_is_made_on_another_worker() -> None:
    schedule = Schedule(
        3,
        8,
        1,
        w=lambda s, b, d: (0, "FBW".index(d.value)),
        n=lambda s, b, d: b,
        in_flight=1,
        split_backward=True,
    )
    model, inputs = build("mlp")
    plan = fxsched.plan(model, schedule, *inputs)
    assert plan.loss is not None
    # worker 0 keeps the weights, which the other two fetch
    assert plan.simulate().latency > max(plan.timeline.end)
    assert max(w.peak_activations for w in plan.simulate().workers) == 1


def test_fetches_that_come_late_stop_no_capped_schedule() -> None:
    keeper, runner = (1, 0, 1), (0, 0, 1)
    schedule = Schedule(
        4,
        3,
        stages=1,
        w=lambda s, b, d: (keeper[b], runner[b]) if d is FORWARD else (2, 2),
        n=lambda s, b, d: b,
        in_flight=1,
    )
    found = simulate(schedule, transfer=1.0, prefetch=0)
    assert found.timeline.complete
    assert found.latency >= simulate(schedule, transfer=1.0).latency


def test_b_of_the_first_microbatch_may_take_no_time() -> None:
    def time(job: Job) -> float:
        return 1.0 if job.direction is FORWARD else 2.0 * (job.microbatch > 0)

    assert len(simulate(schedules.gpipe(2, 3), durations=time).timeline) == 12


def test_a_timeline_of_something_else_is_no_durations() -> None:
    measured = simulate(schedules.gpipe(2, 3)).timeline
    with pytest.raises(PlanError, match=r"no jobs of stage 2; give one of as many"):
        simulate(schedules.gpipe(4, 2), durations=measured)
    with pytest.raises(PlanError, match=r"no W jobs, which zb_h1"):
        simulate(schedules.zb_h1(2, 2), durations=measured)
    with pytest.raises(PlanError, match=r"no B and F jobs"):
        simulate(schedules.gpipe(2, 2), durations=[])


def test_a_schedule_for_other_stages_is_an_error() -> None:
    with pytest.raises(PlanError, match="v_half is made for 4 stages, not 5"):
        simulate(schedules.v_half(2, 2), stages=5)


def test_a_timeline_needs_profile_and_a_call() -> None:
    with pytest.raises(PlanError, match=r"use backend\(schedule, profile=True\)"):
        _ = fxsched.backend(schedules.ddp(2)).timeline
    with pytest.raises(PlanError, match="before the first call"):
        _ = fxsched.backend(schedules.ddp(2), profile=True).timeline


def test_where_backward_runs_later_the_timeline_has_both_parts() -> None:
    model = torch.nn.Linear(4, 4)
    backend = fxsched.backend(schedules.gpipe(1, 2), profile=True)
    out = torch.compile(model, backend=backend)(torch.randn(4, 4))
    assert [str(e.job) for e in backend.timeline] == ["0F0", "0F1"]
    before = torch.compile(model, backend=backend)(torch.randn(4, 4))
    out = torch.compile(model, backend=backend)(torch.randn(4, 4))
    (out.sum() + before.sum()).backward()  # the other call's backward() is not in it
    assert [str(e.job) for e in backend.timeline] == ["0F0", "0F1", "0B0", "0B1"]
    ends = [e.end for e in backend.timeline]
    assert all(a <= e.start for a, e in zip(ends, backend.timeline[1:], strict=False))


def test_each_shard_has_its_share_of_a_stage() -> None:
    plain = schedules.one_f_one_b(2, 4)
    whole = fxsched.simulate(plain)
    halves = fxsched.simulate(schedules.sharded(plain, 2))
    assert halves.latency == whole.latency / 2
    assert [w.busy for w in halves.workers] == [w.busy / 2 for w in whole.workers * 2]
    assert "1f1b x 2 shards: 4 workers, 4 microbatches, 2 stages: step 7.5" in str(
        halves
    )
    picture = halves.diagram().text(100)
    assert "1B0" in picture and "2B0" not in picture  # stages of the model, not pieces
    by_job = fxsched.simulate(schedules.sharded(plain, 2), durations=lambda job: 2.0)
    assert by_job.latency == fxsched.simulate(plain, durations=lambda job: 1.0).latency


def test_shards_wait_for_all_that_the_stage_before_makes() -> None:
    late = fxsched.simulate(schedules.sharded(schedules.gpipe(2, 1), 2), transfer=1.0)
    assert late.latency == (0.5 + 1 + 0.5) + (1 + 1 + 1)


def test_sums_of_shards_take_the_time_of_their_messages() -> None:
    halves = schedules.sharded(schedules.gpipe(1, 1), 2)
    free = fxsched.simulate(halves, sums=3)
    assert free.latency == fxsched.simulate(halves).latency == 1.5
    late = fxsched.simulate(halves, transfer=0.25, sums=3)
    assert late.latency == 1.5 + 2 * 3 * 0.25
    on_link = fxsched.simulate(halves, transfer=fxsched.Link(16), sums=3, sum_bytes=4.0)
    assert on_link.latency == late.latency
    assert [w.activations_sent for w in on_link.workers] == [6, 6]
    for worker in on_link.workers:  # of stages, not of the pieces between sums
        assert (worker.peak_activations, worker.weights_held) == (1, 1)


@pytest.mark.parametrize(
    ("shards", "options", "message"),
    [
        (
            1,
            {"sums": 2},
            r"sums=2\): gpipe x 1 shards has one shard, and no sums",
        ),
        (2, {"sums": -1}, r"sums=-1\): give how many sums shards add up in F of"),
        (2, {"sum_bytes": 8}, r"sum_bytes=8\): give sums= too, how many there are"),
        (2, {"sums": 1, "sum_bytes": "8"}, r"give the bytes of what one shard has"),
    ],
)
def test_what_are_no_sums_is_said(
    shards: int, options: dict[str, Any], message: str
) -> None:
    schedule = schedules.sharded(schedules.gpipe(1, 1), shards)
    with pytest.raises(PlanError, match=message):
        fxsched.simulate(schedule, **options)


def test_a_timeline_does_not_say_what_shards_take() -> None:
    plan = fxsched.simulate(schedules.gpipe(2, 1))
    with pytest.raises(
        PlanError, match="only a plan knows which of their jobs make up"
    ):
        fxsched.simulate(
            schedules.sharded(schedules.gpipe(2, 1), 2), durations=list(plan.timeline)
        )


@pytest.mark.parametrize(
    ("where", "counts"),
    [
        (lambda s, b: None, [4, 3, 2, 1]),
        ("disk", [2, 2, 2, 1]),
        ("host", [2, 2, 2, 1]),
        (lambda s, b: None if s else 3, [2, 3, 2, 4]),
    ],
)
def test_activations_count_where_they_wait(where: Any, counts: list[int]) -> None:
    """As plan.memory: away from F until they come back, a job before B."""
    stages = nx.path_graph(4, nx.DiGraph)
    for _, data in stages.nodes(data=True):
        data.update(held=10.0, weights=0.0)
    schedule = schedules.parked(schedules.one_f_one_b(4, 8), where)
    ran = fxsched.simulate(schedule, stages)
    assert [worker.peak_activations for worker in ran.workers] == counts
    assert [worker.peak_bytes for worker in ran.workers] == [10.0 * n for n in counts]
    assert [peaks.at_once.activations for peaks in ran.memory] == [
        10.0 * n for n in counts
    ]
