"""A rank that fails is named by all others, in time; a part of tests/inject.py."""

from __future__ import annotations

import pytest

from tests.inject import Case, run

CASES = (
    Case(2, "1f1b", "distributed", "static", "stop", 0, agent=False, seed=1),
    Case(2, "fsdp", "gloo", "dynamic", "exception", 1, agent=True, seed=2),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fault)
def test_survivors_name_the_rank_that_failed(case: Case) -> None:
    assert run(case) == []
