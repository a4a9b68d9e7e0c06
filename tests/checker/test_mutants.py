"""The proof finds wrong programs, and wrong passes; see mutants.py."""

from __future__ import annotations

import pytest

from ..mutants import VERDICTS, cases, run_passes, run_programs

SEED = 20


def test_plans_of_all_kinds_are_mutated() -> None:
    assert len(cases()) == 55


@pytest.mark.slow
def test_mutants_of_programs_are_found_or_equal() -> None:
    counts = run_programs(200, SEED, ())
    assert sum(counts[each] for each in VERDICTS) == 200
    assert not counts["wrong"] and counts["found"] > 120


@pytest.mark.slow
def test_mutants_of_the_passes_are_found() -> None:
    counts = run_passes(50, SEED, ())
    assert counts == {"found": 50}
