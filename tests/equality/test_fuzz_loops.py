"""A few random training loops; `python -m tests.fuzz_loops` runs hundreds."""

from __future__ import annotations

import pytest

from ..fuzz_loops import outcome
from ..loops import random_loop


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_random_loop_equals_eager(seed: int) -> None:
    kind, why = outcome(seed, 0)
    assert kind != "failed", f"{why}\n{random_loop(seed)}"
