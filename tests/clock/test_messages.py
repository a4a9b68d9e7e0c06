"""Jobs whose messages are simulated without the step that they are in."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest

import fxsched
from fxsched import Direction, Link, Network, Rate, Schedule, Simulation, schedules
from fxsched.accounts import paper
from fxsched.clock.stage_record import GroupBytes
from fxsched.simulator import simulate

from ..simulated import library, stages_of

Draw = random.Random


def graph(draw: Draw, count: int) -> nx.DiGraph[int]:
    """A chain of stages, some of which read others too; not all give gradients."""
    stages = nx.path_graph(count, nx.DiGraph)
    for a in range(count):
        back = draw.uniform(1, 3) if a else draw.choice([0.0, 2.0])
        times = {"forward": draw.uniform(0.5, 2), "backward": back}
        stages.add_node(a, **times, weights=8.0, held=draw.choice([0.0, 5.0]))
        for b in range(a + 2, count):
            if draw.random() < 0.3:
                stages.add_edge(a, b)
    for _, _, data in stages.edges(data=True):
        values = {f"v{draw.randint(0, 2)}": draw.randint(0, 9) for _ in range(2)}
        size = draw.choice([0.0, 8.0, 8.0, draw.uniform(0, 20)])
        given = [{}, {}, {"whole": size}, {"whole": size / 2}, {"values": values}]
        data.update(bytes=size, **draw.choice(given))
    return stages


def own(draw: Draw) -> Schedule:
    """F, B and W of a stage on any workers; some fetch weights, or renew copies, or
    update them in the step."""
    workers, seed = draw.randint(2, 5), draw.random()
    more = draw.choice(["", "fetched", "renewed", "updated"])

    def any_worker(*what: object) -> int:
        return Draw(f"{seed} {what}").randrange(workers)

    def w(s: int, b: int, d: Direction) -> tuple[int, int]:
        worker = any_worker(s, d, b % 2)
        return any_worker(s) if more == "fetched" else worker, worker

    return Schedule(
        workers=workers,
        microbatches=draw.choice([2, 4, 12]),
        w=w,
        n=lambda s, b, d: 2 * b + (d != "F"),
        u=(lambda s, b: any_worker(s)) if more == "renewed" else None,
        update_every=2 if more == "updated" else None,
        split_backward=draw.random() < 0.5,
        in_flight=None if more == "updated" else draw.choice([None, 1, 2, 3]),
    )


def networks(draw: Draw, workers: int) -> list[Link | Network]:
    hosts = [[w for w in range(workers) if w % 3 == host] for host in range(3)]
    inside, between = Rate(30.0, 0.1, 0.05), Rate(draw.uniform(0.5, 6), 0.2)
    link, half = Link(draw.uniform(0.5, 6), 0.2), Rate(9.0, 0.1, 0.1, duplex=1.2)
    hosts = [host for host in hosts if host]
    return [link, Network(hosts, inside, between), Network(hosts, inside, half)]


def times(found: Simulation) -> tuple[Any, ...]:
    ran = found.timeline
    return found.latency, ran.order, ran.start, ran.end, found.links


CASES: dict[str, Callable[[Draw], Schedule]] = {
    **{name: lambda _, n=name: library(n, 4, 4) for name in schedules.LIBRARY},  # type: ignore[misc]
    "sharded": lambda _: schedules.sharded(schedules.one_f_one_b(2, 4), 2),
    **{f"own {seed}": own for seed in range(24)},
}


@pytest.mark.parametrize("case", CASES)
def test_jobs_run_as_in_their_step(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Draw(case)
    schedule = CASES[case](draw)
    stages = graph(draw, stages_of(schedule))
    on = networks(draw, schedule.workers)
    found = [times(fxsched.simulate(schedule, stages, None, each)) for each in on]
    monkeypatch.setattr(simulate, "need_no_step", lambda *_: False)
    wanted = [times(fxsched.simulate(schedule, stages, None, each)) for each in on]
    assert found == wanted


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "interleaved", "ddp"])
def test_no_step_is_made_where_nothing_is_fetched(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = library(name, 4, 4)
    stages = graph(Draw(0), stages_of(schedule))
    monkeypatch.delattr(paper, "paper_step")
    for each in networks(Draw(0), schedule.workers):
        assert fxsched.simulate(schedule, stages, None, each).latency > 0


def test_a_link_is_busy_from_the_first_byte_to_the_last() -> None:
    """What 0F1 sends leaves after what 0F0 sends; the latency is after both."""
    stages = nx.path_graph(2, nx.DiGraph)
    stages.edges[0, 1]["bytes"] = 8.0
    schedule = schedules.gpipe(workers=2, microbatches=2)

    def links(transfer: Link | Network | float) -> list[tuple[object, ...]]:
        times = {"F": 1, "B": 1}
        return [*map(tuple, fxsched.simulate(schedule, stages, times, transfer).links)]

    apart = Network([[0], [1]], Rate(9.0), Rate(4.0, latency=1.0, message=0.5))
    there, back = ((1.5, 3.5), (4.0, 6.0)), ((9.5, 11.5), (12.0, 14.0))
    assert links(apart) == [
        ("host 0 out", 16.0, there),
        ("host 0 in", 16.0, back),
        ("host 1 out", 16.0, back),
        ("host 1 in", 16.0, there),
    ]
    assert links(Link(4.0, latency=1.0)) == [
        ("worker 0 to worker 1", 16.0, ((1.0, 5.0),)),
        ("worker 1 to worker 0", 16.0, ((8.0, 12.0),)),
    ]
    assert links(1.0) == links(Network([[0, 1]], Rate(1.0), Rate(1.0))) == []


def test_a_link_that_messages_share_is_busy_once() -> None:
    stages: nx.DiGraph[int] = nx.DiGraph()
    stages.add_edges_from([(0, 2), (1, 2)], bytes=8.0)
    places = [0, 1, 2]
    schedule = Schedule(
        3, 1, 3, w=lambda s, b, d: (places[s],) * 2, n=lambda s, b, d: s
    )
    network = Network([[0, 1], [2]], Rate(9.0), Rate(4.0))
    times = {"F": 1, "B": 1}
    first = fxsched.simulate(schedule, stages, times, network).links[0]
    assert first == ("host 0 out", 16.0, ((1.0, 5.0),))
    assert first.seconds == 4.0


@pytest.mark.parametrize("tied", [False, True])
def test_weights_wait_for_the_jobs_of_the_worker_that_keeps_them(tied: bool) -> None:
    """Worker 1 is late, as messages to it take turns."""
    stages: nx.DiGraph[int] = nx.DiGraph()
    stages.add_edges_from([(0, 1), (0, 2)], bytes=10.0)

    def end_of_worker_0(keeper: int) -> float:
        places = [(0, 0), (1, 1), (keeper, 0)]
        schedule = Schedule(
            workers=2,
            microbatches=16,
            w=lambda s, b, d: places[s],
            n=lambda s, b, d: 3 * b + s,
        )
        found = fxsched.simulate(schedule, stages, {"F": 1, "B": 0}, Link(1.0))
        return max(e.end for e in found.timeline if e.worker == 0)

    assert end_of_worker_0(keeper=0) == 32
    if tied:  # kept where the first stage that reads them has them
        stages.add_nodes_from([1, 2], groups=(GroupBytes(0, 8.0, 8.0, 8.0),))
    assert end_of_worker_0(keeper=0 if tied else 1) == 53
