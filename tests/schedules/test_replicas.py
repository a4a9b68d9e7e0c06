"""Schedules whose workers run whole microbatches, and copies of any schedule."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import pytest

from fxsched import Direction, Job, Placement, PlanError, Schedule, schedules, simulate
from tests.simulated import held, inside, kept, library

FORWARD, BACKWARD, _, _ = Direction


def test_a_worker_of_ddp_runs_its_microbatches_one_by_one() -> None:
    ran = simulate(schedules.ddp(2, 8), stages=16)
    assert held(ran) == [16, 16] and kept(ran) == [16, 16]
    assert ran.latency == 4 * 16 * 3


def test_hsdp_shards_inside_groups_and_replicates_across() -> None:
    ran = simulate(schedules.hsdp(8, 4), stages=8)
    assert kept(ran) == [2] * 8
    assert [w.weight_transmissions for w in ran.workers] == [12] * 8
    workers = {schedules.hsdp(8, 4).w(s, 5, FORWARD)[:2] for s in range(8)}
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
