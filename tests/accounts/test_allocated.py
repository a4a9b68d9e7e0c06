"""plan.memory is what a worker's tensors take, op after op."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxsched import Direction, Schedule, schedules
from tests.allocated import held, made

NAMED: dict[str, Any] = {"blocks.0": "recompute", "*blocks.1": "recompute"}
WEIGHTS_LAST = Schedule(
    1, 4, n=lambda s, b, d: list(Direction).index(d), split_backward=True
)
CASES = [
    ("gpt", schedules.gpipe(1, 4), "saved"),
    ("gpt", schedules.gpipe(1, 4), "recompute"),
    ("gpt", schedules.gpipe(1, 4), NAMED),
    ("gpt", schedules.zb_h1(1, 4), "saved"),
    ("gpt", WEIGHTS_LAST, "saved"),
    ("some blocks", schedules.one_f_one_b(1, 8), "saved"),
    ("all blocks", schedules.gpipe(1, 4), "saved"),
    ("unet", schedules.gpipe(1, 4), "saved"),
    ("two_tower", schedules.one_f_one_b(1, 4), "recompute"),
]


@pytest.mark.parametrize(("model", "schedule", "carry"), CASES)
def test_a_worker_holds_what_is_planned(
    model: str, schedule: Schedule, carry: Any
) -> None:
    torch._dynamo.reset()
    planned, measured = held(*made(model), schedule, carry=carry)
    assert planned == pytest.approx(measured, rel=0.02)
