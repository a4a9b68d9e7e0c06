"""Schedules on two hosts of two ranks, in network namespaces."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.equal_hosts import SUMS
from tests.namespaces import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("hosts, names", [(2, ["fsdp", "stale"]), (4, ["hsdp"])])
def test_steps_over_several_hosts_equal_eager(hosts: int, names: list[str]) -> None:
    more = ["--hosts", str(hosts), *names]
    command = [sys.executable, "-m", "tests.equal_hosts", *more]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    if "aren't allowed" in ran.stdout:
        pytest.skip("network namespaces aren't allowed here")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for name in names:
        for sums in SUMS:
            assert f"{name}, sums={sums!r}: equal to eager" in ran.stdout
