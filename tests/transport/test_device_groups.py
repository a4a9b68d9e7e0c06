"""Messages through a process group for each directed edge, as between GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fxsched import PlanError
from fxsched.transport.device_groups import backend_of, check_backend
from tests.ranks_devices import FEWER, SCHEDULES
from tests.started_ranks import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "schedules"), [(2, SCHEDULES), (4, FEWER)], ids=["two", "four"]
)
def test_ranks_equal_eager(ranks: int, schedules: Sequence[str]) -> None:
    found = run_ranks(ranks, "tests.ranks_devices", "equal").stdout
    assert found.count("equal to eager") == ranks * len(schedules)


def test_a_failure_is_told_and_ranks_go_on_after_a_reset() -> None:
    found = run_ranks(2, "tests.ranks_devices", "failure").stdout
    assert "rank 1: ValueError: of rank 1" in found
    assert "rank 0: ConnectionError: rank 1 failed at call 2: ValueError" in found
    assert found.count("goes on") == 2


def test_what_the_device_waits_for_is_named() -> None:
    found = run_ranks(2, "tests.ranks_devices", "watch").stdout
    assert "TimeoutError: rank 0 waited" in found and "call 1, job 0B0" in found


def test_the_cpu_has_no_backend_of_its_own() -> None:
    assert backend_of(torch.device("cpu")) is None
    with pytest.raises(PlanError, match=r"transport='nccl'\): the model's tensors are"):
        check_backend("nccl", torch.device("cpu"))
