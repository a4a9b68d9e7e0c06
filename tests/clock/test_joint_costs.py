"""What global-batch stages cost: measured times, memory, and carry="recompute"."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import Plan, PlanError
from fxsched.ir.graphs import Spec

WIDTH, ROWS, COUNT = 32, 16, 4


class Pairs(nn.Module):
    """Two encoders, and a loss over all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Sequential(
                *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))
            )
            for _ in range(2)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.a(x).mean(1) @ self.b(y).mean(1).T
        return logits.logsumexp(1).mean() - logits.diagonal().mean()


@functools.cache
def model() -> Pairs:
    return Pairs()


def plan(**options: object) -> Plan:
    x = torch.ones(ROWS, 8, WIDTH)
    schedule = fxsched.schedules.one_f_one_b(2, COUNT)
    return fxsched.plan(model(), schedule, x, x, **options)  # type: ignore[arg-type]


@functools.cache
def planned(carry: str) -> Plan:
    return plan(carry=carry)


@pytest.mark.slow
def test_a_profile_measures_what_is_joint_on_whole_rows() -> None:
    x = torch.ones(ROWS, 8, WIDTH)
    whole, parted = (
        fxsched.profile(model(), x, x, microbatches=count, repeats=1)
        for count in (1, COUNT)
    )
    assert whole.measured.keys() == parted.measured.keys()
    joint = {
        key for key in whole.estimated if whole.estimated[key] == parted.estimated[key]
    }
    assert {":matmul:1", ":logsumexp:1"} <= joint
    assert not any("linear" in key for key in joint)
    assert plan(profile=parted).simulate().latency > 0


def held(plan: Plan) -> float:
    return max(peaks.at_once.total for peaks in plan.memory)


def made_by(plan: Plan, stage: str) -> list[Spec]:
    """What a stage gives the others of one microbatch."""
    (call,) = (n for n in plan.step.graph.graph.nodes if n.target == stage)
    return [s for n in call.users if not n.meta.get("bundle") for s in n.meta["specs"]]


@pytest.mark.slow
def test_all_microbatches_of_the_encoders_are_held_but_under_recompute() -> None:
    saved, recomputed = planned("saved"), planned("recompute")
    stage = saved.stages.nodes[0]
    output = COUNT * sum(spec.bytes for spec in made_by(saved, "forward_0"))
    assert saved.memory[0].each.activations == COUNT * stage["held"] + output
    assert recomputed.memory[0].each.activations == output
    assert recomputed.stages.nodes[2]["held"] == saved.stages.nodes[2]["held"]


@pytest.mark.slow
def test_a_memory_limit_proposes_recompute_where_that_suffices() -> None:
    whole, least = held(planned("saved")), held(planned("recompute"))
    assert held(plan(memory_limit=1.1 * whole)) == whole
    message = (
        r"^memory_limit=\d+: no cut .* holds \d+ bytes on worker \d \(.*\), in 3 "
        r"stages, for F of all 4 microbatches come before stage 2\*, where their rows "
        r'meet; write carry="auto", with which B computes blocks again, and the '
        "predicted step takes "
    )
    limit = (whole + least) / 2
    with pytest.raises(PlanError, match=message):
        plan(memory_limit=limit, carry="saved")
    assert held(plan(memory_limit=limit)) <= limit
    assert held(plan(memory_limit=limit, carry="recompute")) == least
    with pytest.raises(PlanError, match="rows meet; raise the limit"):
        plan(memory_limit=0.3 * least)
