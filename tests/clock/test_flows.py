"""Messages that share hosts' ways in and out."""

from __future__ import annotations

import random

import networkx as nx
import pytest

import fxsched
from fxsched import Link, Network, PlanError, Rate, schedules
from fxsched.clock.flows import fair_rates
from fxsched.clock.lines import SECONDS, Lines, run_lines

FAST, SLOW = Rate(1e9), Rate(10.0)
PAIRS = [[0, 1], [2, 3]]


def arrivals(
    network: Network | Link, messages: list[tuple[float, int, int, float]]
) -> dict[int, float]:
    """When messages (when, source, to, bytes) arrive, by their place."""
    count = len(messages)
    pairs = list(dict.fromkeys((source, to) for _, source, to, _ in messages))
    lines = Lines(
        [when for when, *_ in messages] + [size for *_, size in messages],
        [SECONDS, *(network.wire(*pair) for pair in pairs)],
        [0] * count + [1 + pairs.index((a, b)) for _, a, b, _ in messages],
        range(count),
        range(count, 2 * count),
    )
    _, ends = run_lines(lines, network.capacity)
    return dict(enumerate(ends[count:]))


def test_messages_of_several_workers_share_the_way_out_of_their_host() -> None:
    network = Network([[0, 1], [2, 3]], FAST, SLOW)
    both = [(0.0, 0, 2, 100.0), (0.0, 1, 3, 100.0)]
    assert arrivals(network, both) == pytest.approx({0: 20.0, 1: 20.0})
    apart = Network([[0], [1], [2], [3]], FAST, SLOW)
    assert arrivals(apart, both) == pytest.approx({0: 10.0, 1: 10.0})


def test_what_a_message_leaves_goes_to_those_that_share_with_it() -> None:
    network = Network([[0, 1], [2, 3]], FAST, SLOW)
    found = arrivals(network, [(0.0, 0, 2, 100.0), (5.0, 1, 3, 25.0)])
    # alone until 5, then half each until 25 bytes have left, then alone again
    assert found == pytest.approx({1: 10.0, 0: 12.5})


def test_messages_of_a_pair_leave_one_after_the_other() -> None:
    network = Network([[0], [1]], FAST, Rate(10.0, latency=2.0, message=1.0))
    found = arrivals(network, [(0.0, 0, 1, 100.0), (0.0, 0, 1, 50.0)])
    assert found == pytest.approx({0: 13.0, 1: 19.0})


def test_messages_inside_a_host_leave_its_ways_alone() -> None:
    network = Network([[0, 1], [2]], Rate(50.0), SLOW)
    found = arrivals(network, [(0.0, 0, 1, 100.0), (0.0, 0, 2, 100.0)])
    assert found == pytest.approx({0: 2.0, 1: 10.0})


@pytest.mark.parametrize(("duplex", "end"), [(2.0, 10.0), (1.5, 40 / 3), (1.0, 20.0)])
def test_both_ways_share_what_duplex_says(duplex: float, end: float) -> None:
    network = Network([[0], [1]], FAST, Rate(10.0, duplex=duplex))
    found = arrivals(network, [(0.0, 0, 1, 100.0), (0.0, 1, 0, 100.0)])
    assert found == pytest.approx({0: end, 1: end})


def test_rates_are_max_min_fair() -> None:
    draw = random.Random(0)
    for _ in range(200):
        names = range(draw.randint(1, 6))
        capacity = {name: draw.uniform(1, 9) for name in names}
        uses = {
            i: draw.sample(names, draw.randint(1, min(3, len(names))))
            for i in range(draw.randint(1, 8))
        }
        rates = fair_rates(uses, capacity)
        load = {n: sum(rates[i] for i in uses if n in uses[i]) for n in names}
        assert all(load[n] <= capacity[n] * (1 + 1e-9) for n in names)
        for i, own in uses.items():  # each is held by a full resource, as its largest
            assert any(
                load[n] >= capacity[n] * (1 - 1e-9)
                and all(rates[j] <= rates[i] + 1e-9 for j in uses if n in uses[j])
                for n in own
            )


def chain(count: int) -> nx.DiGraph[int]:
    stages = nx.path_graph(count, nx.DiGraph)
    nx.set_edge_attributes(stages, 3.0, "bytes")
    nx.set_node_attributes(stages, 8.0, "weights")
    return stages


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "ddp", "fsdp", "zb_h1"])
def test_a_host_for_each_worker_that_no_messages_share_is_a_link(name: str) -> None:
    schedule = schedules.LIBRARY[name](2, 4)
    stages = chain(schedule.stages or 2)
    network = Network([[0], [1]], FAST, Rate(7.0, 0.05))
    found, wanted = (
        fxsched.simulate(schedule, stages, {"F": 1, "B": 2}, transfer, 1)
        for transfer in (network, Link(7.0, 0.05))
    )
    assert found.latency == pytest.approx(wanted.latency)
    assert found.timeline.order == wanted.timeline.order


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_pairs_of_two_hosts_share_the_cable_that_each_has_on_a_link(name: str) -> None:
    schedule, network = schedules.LIBRARY[name](4, 4), Network(PAIRS, SLOW, SLOW)
    shared, own = (
        fxsched.simulate(schedule, chain(4), {"F": 1, "B": 2}, transfer, 1).latency
        for transfer in (network, Link(10.0))
    )
    assert shared > 1.05 * own


def test_bytes_that_arrive_are_those_of_their_wire() -> None:
    assert arrivals(Link(10.0, latency=1.0), [(1.0, 0, 1, 20.0)]) == {0: 4.0}


def all_rates_anew(
    network: Network, messages: list[tuple[float, int, int, float]]
) -> dict[int, float]:
    """The same for messages of pairs of their own, with new rates for all of them each
    time that one begins or ends."""
    left, ends, now = dict[int, float](), dict[int, float](), 0.0
    to_come = sorted((m[0], i) for i, m in enumerate(messages))
    while to_come or left:
        wires = {i: network.wire(*messages[i][1:3]).resources for i in left}
        rates = fair_rates(wires, network.capacity)
        due = [(now + left[i] / rates[i], i) for i in left]
        when, i = min(due + to_come[:1])
        left = {j: size - rates[j] * (when - now) for j, size in left.items()}
        now = when
        if i in left:
            del left[i]
            ends[i] = now
        else:
            left[i] = messages[i][3]
            del to_come[0]
    return ends


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("duplex", [2.0, 1.3])
@pytest.mark.parametrize("seed", range(10))
def test_rates_change_of_all_that_share_one_with_the_next(
    seed: int, duplex: float, together: bool
) -> None:
    draw = random.Random(seed)
    hosts = [[3 * host, 3 * host + 1, 3 * host + 2] for host in range(5)]
    network = Network(hosts, FAST, Rate(10.0, duplex=duplex))
    every = [(a, b) for a in range(15) for b in range(15) if a // 3 != b // 3]
    pairs = draw.sample(every, 25)
    messages = [(draw.uniform(0, 60), *p, draw.uniform(0, 99)) for p in pairs]
    if together:  # many begin, and end, at the same time
        messages = [
            (20.0 * (t // 20), *p, 30.0 * (size // 30)) for t, *p, size in messages
        ]
    wanted = all_rates_anew(network, messages)
    assert arrivals(network, messages) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Network([[0, 2]], FAST, SLOW), r"hosts=\[\[0, 2\]\].*numbered from 0"),
        (lambda: Network([0, 1], FAST, SLOW), "give the workers of each host"),  # type: ignore[list-item]
        (lambda: Network([[0], [0]], FAST, SLOW), "each worker once"),
        (lambda: Network([[0]], FAST, 1.0), "between=1.0.*give a Rate"),  # type: ignore[arg-type]
        (lambda: Rate(0.0), "a bandwidth above 0"),
        (lambda: Rate(1.0, duplex=3.0), "a duplex of 1.0 to 2.0"),
        (
            lambda: fxsched.simulate(
                schedules.gpipe(4, 4),
                chain(4),
                transfer=Network([[0], [1]], FAST, SLOW),
            ),
            "has 2 workers, but the schedule has 4",
        ),
    ],
)
def test_wrong_networks_are_errors(make: object, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        make()  # type: ignore[operator]


def test_a_network_of_hosts_has_sums_in_pieces() -> None:
    """Each host sends each gradient once. Half of `weights` are gradients: 2 MB."""
    stages = nx.DiGraph()
    for stage in range(4):
        stages.add_node(stage, weights=1e6)
    stages.add_edges_from([(s, s + 1, {"bytes": 0.0}) for s in range(3)])
    network = Network([[0, 1], [2, 3]], Rate(1e12), Rate(1e6))
    found = fxsched.simulate(
        schedules.ddp(4, 4), stages, {"F": 1e-9, "B": 1e-9}, network, prefetch=1
    )
    assert found.latency == pytest.approx(2.0, rel=0.01)
    apart = Network([[0], [1], [2], [3]], Rate(1e12), Rate(1e6))
    found = fxsched.simulate(
        schedules.ddp(4, 4), stages, {"F": 1e-9, "B": 1e-9}, apart, prefetch=1
    )
    assert found.latency == pytest.approx(2 * 3 / 4 * 2.0, rel=0.01)  # as a ring


def test_a_sum_is_made_on_a_server_beside_those_who_give() -> None:
    """The workers of a host add up theirs on the server itself, which gives nothing."""
    schedule = schedules.parameter_server(5, 8)
    network = Network([[0, 1], [2, 3, 4]], Rate(1e12), Rate(1e6))
    found = fxsched.simulate(schedule, chain(4), {"F": 1, "B": 2}, network, prefetch=1)
    assert found.latency > 0
