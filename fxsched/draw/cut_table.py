"""Which weights are cut into shards, as a table."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Sequence

from ..ir.parts import WeightCut
from .tables import LEAST, WIDE, columns, cut_names, table

NAME = 36  # characters of a weight's name; of longer ones its end, if the ends differ


def cut_table(cuts: Sequence[WeightCut]) -> Iterator[str]:
    """The weights of several dimensions, how they are cut and why others aren't; those
    of alike layers in one row, with * for their numbers."""
    if not cuts:
        return
    alike: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for name, shape, word, why, _ in cuts:
        how = f"{word}: {why}" if why else word
        key = _alike(name), " x ".join(map(str, shape)), _alike(how)
        alike.setdefault(key, []).append((name, how))
    names = [name if many[1:] else many[0][0] for (name, _, _), many in alike.items()]
    ends = [*map(_end, names)]
    names = ends if len({*ends}) == len({*names}) else cut_names(names, NAME)
    shapes = [shape for _, shape, _ in alike]
    taken = max(map(len, names)) + 2 + len("count") + 4 + max(map(len, shapes)) + 2
    room = max(columns(WIDE) - taken, LEAST)
    rows = [
        (name, len(many), shape, textwrap.fill(how if many[1:] else many[0][1], room))
        for name, ((_, shape, how), many) in zip(names, alike.items(), strict=True)
    ]
    yield table("weight|count|shape|cut", rows, "lrl")
    shards = max(each.parts for each in cuts)
    every = sum(math.prod(each.shape) for each in cuts)
    cut = sum(math.prod(each.shape) for each in cuts if each.parts > 1)
    yield (
        f"{100 * cut / every:.1f} % of these weights are cut: each of {shards} shards "
        f"keeps {100 * cut / every / shards:.1f} %; the first also keeps the whole ones"
    )


def _alike(text: str) -> str:
    """A text with * for the first number in a name, as of one of many layers."""
    return re.sub(r"(?<=\.)\d+(?=[.\s]|$)", "*", text, count=1)


def _end(name: str) -> str:
    while len(name) > NAME and "." in name.lstrip("."):
        name = f"..{name.lstrip('.').partition('.')[2]}"
    return name
