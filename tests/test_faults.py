"""Ranks that depart from each other: an error on every rank, and no hang."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def said() -> dict[tuple[int, str], str]:
    """What each rank of tests/ranks_faults.py says of each case."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
        *("-m", "tests.ranks_faults"),
    ]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.split(r"^rank (\d): ([^:\n]*): ", done.stdout, flags=re.MULTILINE)
    return {
        (int(rank), case): text
        for rank, case, text in zip(lines[1::3], lines[2::3], lines[3::3], strict=True)
    }


Said = dict[tuple[int, str], str]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("relu", r"rank 0: .*tanh\(.*self.between.*\n *rank 1: .*relu\(.*ranks_faults"),
        ("reduction", r"rank 0: .*'mean'\n *rank 1: .*'sum'"),
        ("passes", r"rank 1 has passes=\[.*<lambda>.*rank 0 has \[\]"),
    ],
)
def test_other_arithmetic_is_an_error(
    said: Said, rank: int, case: str, text: str
) -> None:
    assert re.search(text, said[rank, case]), said[rank, case]
