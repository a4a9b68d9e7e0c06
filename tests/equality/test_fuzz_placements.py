"""A few random models by random schedules; `python -m tests.fuzz_placements` runs a
thousand."""

from __future__ import annotations

import pytest

from ..fuzz_placements import case_of, outcome

CASES, LINES = 60, 6  # the command's models have 40
GROUPS = 4


@pytest.mark.slow
@pytest.mark.parametrize("group", range(GROUPS))
def test_random_models_equal_eager(group: int) -> None:
    kinds = []
    for seed in range(group, CASES, GROUPS):
        case = case_of(seed, LINES)
        kind, why = outcome(case)
        assert kind in ("equal", "refused"), f"{kind}: {why}\n{case}"
        kinds.append(kind)
    assert kinds.count("equal") > len(kinds) / 2
