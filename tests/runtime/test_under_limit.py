"""What waits on disk takes no memory of the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ..torchrun import ONE_THREAD, ROOT

LIMIT = 1000  # MiB, of which PyTorch itself takes some 350


def train(how: str, limit: int, file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.under_limit", how, str(limit), str(file)]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | ONE_THREAD,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_a_model_that_needs_three_times_the_limit_trains_with_disk(
    tmp_path: Path,
) -> None:
    for how in ("eager", "memory"):
        ran = train(how, LIMIT, tmp_path / how)
        assert ran.returncode == 1, ran.stderr
        assert "can't allocate memory" in ran.stderr, ran.stderr
    for how, limit in (("eager", 0), ("disk", LIMIT)):
        ran = train(how, limit, tmp_path / how)
        assert ran.returncode == 0, ran.stderr
    wanted, found = (torch.load(tmp_path / how) for how in ("eager", "disk"))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
