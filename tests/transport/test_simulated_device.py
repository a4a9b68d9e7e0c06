"""A simulated device, in a process of its own, which it is registered for."""

from __future__ import annotations

import subprocess
import sys

import pytest


def printed(module: str, *arguments: str) -> str:
    """What a module prints, which must end well."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedules", "models", "queues"),
    [
        (["1f1b", "fsdp", "zb_v"], ["gpt"], ["--queues", "1"]),
        (["ddp", "interleaved", "fslpp"], ["two_tower"], ["--queues", "8"]),
        (["graph", "zero2", "gpipe"], ["tied"], []),
    ],
    ids=["one queue", "eight", "any"],
)
def test_training_equals_eager(
    schedules: list[str], models: list[str], queues: list[str]
) -> None:
    given = "--schedules", *schedules, "--models", *models, *queues
    assert printed("tests.sim", *given) == f"{len(schedules)} equal"


def test_each_wait_is_needed() -> None:
    found = printed("tests.sim", "--waits", "--schedules", "1f1b")
    assert "caught" in found and "missed" not in found


def test_graphs_give_the_same_bits() -> None:
    assert printed("tests.sim.checks", "graphs") == "graphs give the same bits"


def test_activations_wait_elsewhere() -> None:
    found = printed("tests.sim.checks", "parked")
    assert found == "parked activations come back"


def test_streams_times_and_memory() -> None:
    found = printed("tests.sim.checks", "stream", "timeline", "host", "memory")
    assert found == "memory as planned"
