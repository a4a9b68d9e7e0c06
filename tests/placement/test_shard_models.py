"""Models that nobody here wrote, in shards: equal, and evenly cut."""

from __future__ import annotations

import pytest

from ..shard_models import CASES, made, share, sums
from ..shard_sweep import Cell, check


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule", "by"),
    [
        ("grouped_llama", "gpipe", "name"),
        ("bert", "gpipe", "auto"),
        ("t5", "gpipe", "auto"),
        ("vit", "gpipe", "auto"),
        ("mixtral", "1f1b", "auto"),
        ("clip", "gpipe", "auto"),
    ],
)
def test_models_of_transformers_in_shards_equal_eager(
    name: str, schedule: str, by: str
) -> None:
    plan = check(Cell(name, schedule, 2, by))
    case = CASES[name]
    if case.sums or case.even:
        assert share(plan, made(name)[0], case.layers) <= 0.55
    if case.sums:
        forward, backward = sums(plan)
        assert forward == case.sums >= backward
