"""A few rows of the zoo; `python -m tests.zoo` runs them all."""

from __future__ import annotations

import pytest

from ..zoo import cases
from ..zoo.__main__ import show
from ..zoo.compare import Asked, run

CASES = cases.all_cases()
SHARDED = (  # what they do between cut weights
    *("buffer_written_in_place", "buffer_reassigned", "slices_written"),
    *(
        "heads_masked_in_place",
        "added_in_place",
        "centred_over_the_batch",
        "complex_linear",
    ),
    *("own_autograd_function", "reversed_gradient"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.FAST)
def test_a_row_is_equal_to_eager(name: str) -> None:
    row = run(CASES[name])
    assert row.kind == "equal", show([row])


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED)
def test_a_row_in_shards_is_equal_to_eager(name: str) -> None:
    row = run(CASES[name], Asked("gpipe", shards=2))
    assert row.kind == "equal" and "weights cut" in row.detail, show([row])


def test_there_are_enough_rows() -> None:
    assert len(CASES) >= 150
