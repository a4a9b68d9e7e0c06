"""A rank that fails is named by all others, in time; a part of tests/inject.py, and of
tests/inject_plans.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.inject import Case, run
from tests.inject_plans import LEFT_OUT
from tests.torchrun import ROOT

CASES = (
    Case(2, "1f1b", "distributed", "static", "stop", 0, agent=False, seed=1),
    Case(2, "fsdp", "gloo", "dynamic", "exception", 1, agent=True, seed=2),
)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fault)
def test_survivors_name_the_rank_that_failed(case: Case) -> None:
    assert run(case) == []


@pytest.mark.slow
def test_a_slow_rank_a_full_disk_and_a_cut_link_are_survived_or_named() -> None:
    command = [sys.executable, "-m", "tests.inject_plans", "--first", "8", "--plans"]
    done = subprocess.run([*command, "4"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "slow on 0, late on 1" in done.stdout
    if LEFT_OUT in done.stdout:
        pytest.skip(LEFT_OUT)
    assert "disk on 0, cut on 1" in done.stdout
