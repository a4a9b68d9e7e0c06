"""Ranks keep their parts of weights, and train, save and load as eager PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks_shards import EVERY_RANK
from tests.started_ranks import run_ranks


@pytest.mark.slow
def test_two_ranks_in_shards_equal_eager_save_load_and_refuse(tmp_path: Path) -> None:
    printed = run_ranks(2, "tests.ranks_shards", str(tmp_path)).stdout
    assert printed.count("equal to eager") == 2 * (len(EVERY_RANK[2]()) + 2), printed
    assert printed.count("saved and loaded") == printed.count("refused") == 2, printed


@pytest.mark.slow
def test_four_ranks_in_shards_equal_eager(tmp_path: Path) -> None:
    printed = run_ranks(4, "tests.ranks_shards", str(tmp_path)).stdout
    assert printed.count("equal to eager") == 4 * (len(EVERY_RANK[4]()) + 1), printed
