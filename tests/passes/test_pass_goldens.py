"""Each pass on a tiny graph of its own, before and after, as its docstring shows.

Stages are named, not chosen, and one microbatch has one order: what a pass before this
one decides otherwise changes no golden but its own. `--update-golden` writes them anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn

import fxsched
from fxsched import Schedule, pipeline, schedules
from fxsched.ir.request import Order
from fxsched.ir.step import Step
from tests.text import (
    graph_text,
    groups_text,
    loss_text,
    node_text,
    pieces_text,
    stage_count_text,
    step_text,
)

HEADS: dict[str, Callable[[fx.GraphModule], list[str]]] = {
    "assign_stages": stage_count_text,
    "shard_stages": pieces_text,
    "split_stages": groups_text,
    "differentiate_stages": loss_text,
}


class Chain(nn.Module):
    """Two layers, each a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).mean()


class Masked(Chain):
    """Both layers read a mask that takes less to compute than to send."""

    def forward(self, x: Tensor) -> Tensor:
        keep = (x != 0).all(1, keepdim=True)
        return (self.b(self.a(x) * keep) * keep).mean()


class Residual(Chain):
    """Two stages after the first read what it makes."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return (fxsched.stage_boundary(self.b(h)) + h).mean()


class Case(NamedTuple):
    """What a pass is shown on."""

    schedule: Schedule = schedules.gpipe(2, 1)
    model: type[nn.Module] = Chain
    order: Order = "static"
    deterministic: bool = False
    stages: tuple[str, ...] = ("b",)
    network: fxsched.Network | None = None
    carry: str | dict[str, Any] = "auto"


class Wide(Chain):
    """A layer whose outputs the next one adds up, and a norm, which all shards make."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 4), nn.Linear(4, 2)
        self.norm, self.last = nn.LayerNorm(2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.b(self.a(x).relu()))).mean()


def elsewhere() -> Schedule:
    """Worker 0 runs all and keeps the first stage; worker 1 keeps the second."""
    return Schedule(2, 1, stages=2, w=lambda s, b, d: (s, 0), n=lambda s, b, d: 0)


def updated() -> Schedule:
    """Two workers with a copy of the weights each, of which worker 1 updates one."""
    return replace(schedules.ddp(2), stages=2, update_every=2, u=lambda s, b: s)


def stale() -> Schedule:
    """One worker, whose second microbatch reads weights of before the first update."""
    every = replace(schedules.ddp(1, 2), stages=2, update_every=1)
    return replace(every, version=lambda s, b, d: 0)


def served() -> Schedule:
    """Worker 2 keeps the weights, and updates them as gradients come."""
    return replace(schedules.parameter_server(3, 4, asynchronous=True), stages=2)


TWO_HOSTS = fxsched.Network([[0], [1]], *2 * [fxsched.Rate(1e9)])
CASES = {
    "mark_recomputed": Case(carry={"a": "recompute"}),
    "assign_stages": Case(),
    "shard_stages": Case(schedules.sharded(schedules.gpipe(1, 1), 2), Wide, stages=()),
    "keep_gradient_order": Case(schedules.gpipe(3, 1), Residual, deterministic=True),
    "copy_shared": Case(model=Masked),
    "split_stages": Case(),
    "differentiate_stages": Case(),
    "order_jobs": Case(schedules.one_f_one_b(2, 2)),
    "unroll_jobs": Case(),
    "renew_copies": Case(replace(updated(), update_every=None)),
    "update_on_arrival": Case(served(), order="dynamic"),
    "update_weights": Case(updated()),
    "protect_versions": Case(stale()),
    "collect_results": Case(schedules.ddp(2)),
    "lower_sums": Case(updated()),
    "place_saved": Case(schedules.parked(schedules.gpipe(2, 4), 0)),
    "route_values": Case(elsewhere()),
    "place_receives": Case(schedules.gpipe(2, 2), network=TWO_HOSTS),
    "cut_program": Case(),
    "free_values": Case(),
}


def test_every_pass_has_a_case() -> None:
    passes = (*pipeline.GRAPH_PASSES, *pipeline.STEP_PASSES)
    names = [each.__name__ for each in passes]
    assert list(CASES) == [*names, "cut_program", "free_values"]


@pytest.mark.parametrize("name", CASES)
def test_a_pass_does_what_its_docstring_shows(
    name: str, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def shown(each: Callable[..., Any]) -> Callable[..., Any]:
        def run(given: Any, *rest: Any) -> Any:
            seen.append(text(given, name, after=False))
            made = each(given, *rest)
            seen.append(text(made, name, after=True))
            return made

        return run if each.__name__ == name else each

    for kind in ("GRAPH_PASSES", "STEP_PASSES"):
        passes = tuple(map(shown, getattr(pipeline, kind)))
        monkeypatch.setattr(pipeline, kind, passes)
    for each in (pipeline.cut_program, pipeline.free_values):
        monkeypatch.setattr(pipeline, each.__name__, shown(each))
    case = CASES[name]
    plan = fxsched.plan(
        case.model(),
        case.schedule,
        torch.ones(4, 2),
        stages=case.stages or "auto",
        order=case.order,
        deterministic=case.deterministic,
        network=case.network,
        carry=case.carry,
    )
    assert plan.programs[0]
    before, after = seen
    golden(name, f"before:\n\n{before}\n\nafter:\n\n{after}")


def text(given: Any, name: str, after: bool) -> str:
    """What a pass reads or makes: a graph of the model, a step, or a program."""
    if isinstance(given, Step):
        return step_text(given) if given.jobs else graph_text(given.graph)
    if isinstance(given, fx.Graph):
        return "\n".join(map(node_text, given.nodes))
    head = HEADS[name](given) if name in HEADS and after else []
    return graph_text(given, head, stages=name in ("copy_shared", "split_stages"))
