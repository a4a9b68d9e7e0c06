"""A few rows of the zoo; `python -m tests.zoo` runs them all."""

from __future__ import annotations

import pytest

from .zoo import cases
from .zoo.__main__ import show
from .zoo.compare import run

CASES = cases.all_cases()


@pytest.mark.parametrize("name", cases.FAST)
def test_a_row_is_equal_to_eager(name: str) -> None:
    row = run(CASES[name])
    assert row.kind == "equal", show([row])


def test_there_are_enough_rows() -> None:
    assert len(CASES) >= 150
