"""A plan on a network: where the model is cut, what is predicted, what is refused."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, schedules
from fxsched.draw.tables import byte_text

LOCAL = fxsched.Rate(2e9, 5e-5)


def between(megabits: float, hosts: list[list[int]] | None = None) -> fxsched.Network:
    rate = fxsched.Rate(megabits * 1e6 / 8, 1e-4)
    return fxsched.Network(hosts or [[0], [1]], LOCAL, rate)


class Shrinking(nn.Module):
    """Values get smaller from layer to layer; the first layers are the slow ones."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 16, 32, 64, 64)
        self.body = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.MaxPool2d(2))
                for a, b in pairwise(sizes)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()


X = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def planned(**options: Any) -> fxsched.Plan:
    schedule = schedules.one_f_one_b(2, 4)
    return fxsched.plan(Shrinking(), schedule, X, **options)


def crossing(plan: fxsched.Plan) -> float:
    return sum(plan.stages.edges[edge]["bytes"] for edge in plan.stages.edges)


def test_a_slower_network_moves_the_cut_to_where_fewer_bytes_cross() -> None:
    fast, slow = (planned(network=between(rate)) for rate in (100_000, 200))
    assert crossing(slow) < crossing(fast)
    # each is the better cut on its own network
    assert fast.simulate(transfer=between(200)).latency > slow.simulate().latency
    assert fast.simulate().latency < slow.simulate(transfer=between(100_000)).latency


def test_the_predicted_step_is_that_on_the_network() -> None:
    network = between(200)
    plan = planned(network=network)
    assert plan.simulate().latency == plan.simulate(transfer=network).latency
    assert plan.simulate().latency > plan.simulate(transfer=0.0).latency
    assert f"step: {plan.simulate().latency * 1e3:.4g} ms" in plan.line


def test_a_plan_says_how_busy_links_are() -> None:
    slow, fast = (planned(network=between(rate)) for rate in (1, 100_000))
    sent, found = crossing(slow), slow.simulate()
    out, back = found.links[0], found.links[1]
    assert (out.name, back.name) == ("host 0 out", "host 0 in")
    assert out.bytes == back.bytes == 4 * sent
    share = f"{100 * out.seconds / found.latency:.1f} %"
    assert f"\nhost 0 out  {byte_text(out.bytes)}" in slow.explain()
    assert share in slow.explain()
    assert "is busy" not in fast.explain()
    ddp = fxsched.plan(Shrinking(), schedules.ddp(2, 4), X, network=between(1))
    assert re.search(r"the link 'host . \S+' is busy 9", ddp.explain())
    assert "link" not in planned().explain()


def test_a_link_and_a_file_are_networks_too(tmp_path: Path) -> None:
    network = between(200)
    network.save(tmp_path / "net.json")
    assert fxsched.Network.load(tmp_path / "net.json") == network
    same = planned(network=str(tmp_path / "net.json"))
    link = planned(network=fxsched.Link(200e6 / 8, 1e-4))
    assert same.simulate().latency == planned(network=network).simulate().latency
    assert link.simulate().latency == pytest.approx(same.simulate().latency)


def test_a_search_is_on_the_networks_of_its_plans() -> None:
    """Over a slow network one sends as little as possible: one worker does it all."""
    steps = {}
    for rate in (100_000, 20):
        kwargs = {"network": between(rate)}
        found = fxsched.search(
            Shrinking(), 2, 4, args=(X,), kwargs=kwargs, effort=0.1, quiet=True
        )
        plan = fxsched.plan(Shrinking(), found, X, **kwargs)
        steps[rate] = plan.simulate().latency
        if rate == 20:
            ddp = fxsched.plan(Shrinking(), schedules.ddp(2, 4), X, **kwargs)
            assert plan.simulate().latency < ddp.simulate().latency
    assert steps[100_000] < steps[20]


def test_what_is_no_network_is_refused(tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text("{}")
    (tmp_path / "rate.json").write_text(
        '{"hosts": [[0]], "inside": {"bandwidth": 0}, "between": {"bandwidth": 1}}'
    )
    for network, message in (
        (3, r"plan\(network=3\): give a fxsched.Network or Link, a file that"),
        (between(1, [[0, 1], [2]]), r"has 3 workers, but the schedule has 2"),
        (tmp_path / "none.json", r"none.json: No such file .*; give a file that `fxs"),
        (tmp_path / "no.json", r"no.json holds no network: 'inside'; give a file"),
        (tmp_path / "rate.json", r"Rate\(bandwidth=0, .*: give a bandwidth above 0"),
    ):
        with pytest.raises(PlanError, match=message):
            planned(network=network)
