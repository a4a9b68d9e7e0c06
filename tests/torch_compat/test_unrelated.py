"""What fxsched changes of PyTorch leaves other models as they are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.started_ranks import run_ranks
from tests.torchrun import ONE_THREAD


@pytest.mark.slow
def test_an_unrelated_model_trains_to_the_same_bits() -> None:
    script = "import sys; from tests.ranks_unrelated import unrelated; "
    script += "assert 'fxsched' not in sys.modules; print(unrelated())"
    alone = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | ONE_THREAD,
    ).stdout.strip()
    done = run_ranks(2, "tests.ranks_unrelated")
    assert done.stdout.count(f"beside: {alone}") == 2, done.stdout
    assert done.stdout.count(f"after: {alone}, 0 records") == 2, done.stdout
