"""200 random (DAG of 2..6 stages, w, n, cap) plans: checked, run on threads, compared
with eager; python -m tests.soak goes on for hours."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxsched
from fxsched import Direction, Schedule
from tests import soak
from tests.random_plans import assert_family_equals_eager, random_family, within

MODELS, SCHEDULES, CHUNK = 50, 4, 5  # models share a trace among their schedules


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, MODELS, CHUNK))
def test_random_plans_are_sound_and_equal_eager(first: int) -> None:
    for seed in range(first, first + CHUNK):
        torch._dynamo.reset()
        try:
            with within(100):
                assert_family_equals_eager(random_family(seed, SCHEDULES))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            pytest.fail(f"random_family({seed}, {SCHEDULES}): {text}")


@pytest.mark.slow
def test_soak_says_which_seed_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(case: object, transport: str) -> None:
        raise AssertionError(transport)

    monkeypatch.setattr("sys.argv", ["soak", "--first", "3", "--count", "2"])
    assert soak.main() == 0
    monkeypatch.setattr(soak, "assert_equals_eager", fail)
    assert soak.main() == 1
    printed = capsys.readouterr().out
    assert "2 of 2 plans equal eager" in printed
    assert "rank 0, seed 4: AssertionError: threads" in printed
    assert "0 of 2 plans equal eager" in printed


@pytest.mark.slow
def test_what_a_worker_receives_in_the_call_is_there_in_backward() -> None:
    """Worker 1 has nothing to do in the call but to receive what its B will read."""
    size = 2000  # so long an F that worker 1 waits for it
    model = nn.Sequential(nn.Linear(size, size), nn.Tanh())
    schedule = Schedule(2, 2, 1, w=lambda s, b, d: (0, int(d is Direction.BACKWARD)))
    backend = fxsched.backend(schedule, transport="threads", order="dynamic")
    out = torch.compile(model, backend=backend)(torch.ones(2 * size, size))
    with within(10):
        out.sum().backward()
    assert model[0].bias.grad is not None
