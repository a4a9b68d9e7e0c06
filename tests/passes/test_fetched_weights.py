"""How many jobs' weights a worker asks others for at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxsched
from fxsched import Direction, Placement, Schedule
from fxsched.ir import ops


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_worker_has_weights_of_no_more_than_prefetch_further_jobs(
    prefetch: int,
) -> None:
    """Worker 1 keeps what worker 0 reads, each twice in a row."""

    def n(s: int, b: int, d: Direction) -> int:
        return 2 * s + b if d is Direction.FORWARD else 100 - 2 * s + b

    schedule = Schedule(2, 2, 4, lambda s, b, d: Placement(1, 0), n)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)))
    plan = fxsched.plan(model, schedule, torch.randn(8, 32), prefetch=prefetch)
    here, most = set[object](), 0
    for node in plan.programs[0].graph.nodes:
        if node.target is ops.fetch:
            here.add(node)
        elif node.target is ops.free:
            here -= set(node.args)
        most = max(most, len(here))
    assert most == prefetch + 1
