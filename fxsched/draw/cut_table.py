"""Which weights are cut into shards, as a table."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from ..ir.parts import WeightCut
from .tables import table

EXPLAINED = 100  # columns of what explains a plan


def cut_table(cuts: Sequence[WeightCut]) -> Iterator[str]:
    """The weights of several dimensions, how they are cut and why others aren't; those
    of alike layers in one row, with * for their numbers."""
    if not cuts:
        return
    alike: dict[tuple[str, ...], int] = {}
    for name, shape, word, why, _ in cuts:
        how = f"{word}: {why}" if why else word
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name, count=1)
        key = pattern, " x ".join(map(str, shape)), how
        alike[key] = alike.get(key, 0) + 1
    rows = [(name, n, shape, how) for (name, shape, how), n in alike.items()]
    yield table("weight|of them|shape|cut", rows, "lrl", EXPLAINED)
    shards = max(each.parts for each in cuts)
    every = sum(math.prod(each.shape) for each in cuts)
    cut = sum(math.prod(each.shape) for each in cuts if each.parts > 1)
    yield (
        f"{100 * cut / every:.1f} % of these weights are cut: each of {shards} shards "
        f"has {100 * cut / every / shards:.1f} %, the first one the whole ones too"
    )
