"""Two machines; see tests/several_machines.py and tests/link_down.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import several_machines
from tests.link_down import LEFT_OUT
from tests.torchrun import ROOT


@pytest.mark.slow
def test_two_machines_train_as_threads_do() -> None:
    assert several_machines.main() == 0


@pytest.mark.slow
def test_a_network_that_is_down_holds_up_a_step_or_is_named_by_both_ranks() -> None:
    command = [sys.executable, "-m", "tests.link_down"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    if LEFT_OUT in done.stdout:
        pytest.skip(LEFT_OUT)
    assert "down for good: both ranks named the other" in done.stdout
