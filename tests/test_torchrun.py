"""The same over torch.distributed: torchrun with 2 and 4 gloo processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import EVERY_RANK

ROOT = Path(__file__).parents[1]


def torchrun(
    processes: int, *arguments: str, module: str = "tests.ranks"
) -> subprocess.CompletedProcess[str]:
    """Runs a module of ranks on loopback; its output holds what the ranks print."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nproc-per-node", str(processes)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
        *("-m", module, *arguments),
    ]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400
    )


@pytest.mark.parametrize("processes", [2, 4])
def test_ranks_equal_eager(processes: int) -> None:
    done = torchrun(processes, "equal")
    assert done.returncode == 0, done.stdout + done.stderr
    cases = len(EVERY_RANK[processes]())
    assert done.stdout.count("equal to eager") == cases * processes, done.stdout


def test_ranks_keep_one_model_between_them() -> None:
    done = torchrun(4, "memory")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "one model between 4 ranks" in done.stdout


def test_ranks_hold_weights_of_few_jobs() -> None:
    done = torchrun(2, "slots")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("no more weights than asked for") == 2


def test_owners_start_from_the_first_and_end_with_the_same_bits() -> None:
    done = torchrun(2, "replicas")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same bits on 2 ranks" in done.stdout


def test_backward_after_the_call_evaluation_and_new_shapes() -> None:
    done = torchrun(2, "contract")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("contract holds") == 2, done.stdout
    for text, ranks in (
        ("has no send", (0, 1)),
        ("PlanError: rank 1 could not write its program: ZeroDivisionError", (0,)),
        ("ZeroDivisionError: of rank 1", (1,)),
        ("rank 1 planned other programs than rank 0", (0, 1)),
    ):
        for rank in ranks:
            assert re.search(f"rank {rank}: .*{text}", done.stdout), (text, done.stdout)


def test_ranks_plan_by_what_rank_0_measured_and_get_its_errors() -> None:
    done = torchrun(2, "profiled")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the batch size is fixed to 8") == 2, done.stdout


def test_a_world_of_another_size_is_an_error_on_every_rank() -> None:
    done = torchrun(2, "world")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the schedule has 4 workers, but torch.distr") == 2
