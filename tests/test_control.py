"""What ranks make of what the others have written on the board."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from fxsched import PlanError
from fxsched.transport.control import Control


def planned(text: str = "x float32[8]") -> tuple[Control, Control]:
    """Two ranks that have planned their first call together."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    ranks = [Control(rank, 2, 30.0, store) for rank in range(2)]
    for control in ranks:
        control.calls += 1
    other = threading.Thread(None, ranks[1].plan, "plans", (text,))
    other.start()
    assert ranks[0].plan(text) == [text, text]
    other.join()
    return ranks[0], ranks[1]


def test_a_rank_that_planned_an_earlier_call_is_not_apart() -> None:
    first, second = planned()
    assert first.read(1).kind == "plans"  # it has written nothing since
    for control in (first, second):
        control.calls += 1
    first.idle(1, None, time.monotonic())  # such as for new values of weights


def test_a_rank_that_plans_a_call_which_another_runs_is() -> None:
    first, second = planned()
    for control in (first, second):
        control.calls += 1
    second.plans += 1
    second.write("plans", None, "x float32[4]")
    with pytest.raises(PlanError, match=r"rank 1 plans call 2 anew, for x float32\[4"):
        first.idle(1, None, time.monotonic())
