"""A part of python -m tests.random_shards."""

from __future__ import annotations

import pytest

from ..random_shards import sweep


@pytest.mark.slow
def test_random_models_in_shards_equal_eager() -> None:
    found = sweep(range(6))
    assert found["equal"] >= 4, found
    assert not found["failed"], found
