"""The ways in which a region can run: with what between its sums in slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase

from torch import fx

from ..jobs.job import PlanError
from .grower import Grower
from .nodes import is_weight, where
from .region import Region
from .slices import DIMS, in_slices, sums_in_slices


def variants(
    grower: Grower, region: Region, slices: list[str] | None = None
) -> list[Region]:
    """The ways in which a region can run, of which the fastest is to be taken.

    slices: patterns of names of modules whose norms and the like are to be in slices;
        None for all, where that is faster.
    Raises PlanError for names of modules that nothing can be sliced in.
    """
    if slices is None:
        ways = [region, *_sliced(grower, region, lambda node: True)[:1]]
    else:
        ways = _named(grower, region, slices) if slices else [region]
    if grower.follower.shards > 2:
        ways += [sums_in_slices(grower, each) for each in ways]
    return ways


def _sliced(
    grower: Grower, region: Region, may: Callable[[fx.Node], bool]
) -> list[Region]:
    """The region in slices along each dimension, that of the most nodes first."""
    every = [in_slices(grower, region, dim, may) for dim in DIMS]
    some = [each for each in every if each.scattered]
    return sorted(some, key=lambda each: -len(each.layouts))


def _named(grower: Grower, region: Region, patterns: list[str]) -> list[Region]:
    """The ways in which something of each module that is named is in slices."""

    def may(node: fx.Node) -> bool:
        return _is_in(node, patterns) or not any(map(is_weight, node.all_input_nodes))

    ways = _sliced(grower, region, may)
    for pattern in patterns:
        fits = [way for way in ways if any(_within(way, region, pattern))]
        if not fits:
            raise PlanError(
                f"shards={{{pattern!r}: 'sequence'}}: nothing in modules of that name "
                f"comes of sums, with rows that divide by {grower.follower.shards}; "
                "name norms and dropout between weights that are cut"
            )
        ways = fits
    return ways[:1]


def _within(way: Region, region: Region, pattern: str) -> Iterator[bool]:
    for node in way.layouts.keys() - region.layouts.keys():
        yield _is_in(node, [pattern])


def _is_in(node: fx.Node, patterns: list[str]) -> bool:
    name = str(node.meta["module"])
    return any(
        fnmatchcase(name, each) or fnmatchcase(name, f"{each}.*") for each in patterns
    )


def slices_text(way: Region, region: Region) -> str:
    """What is said of a way in which a region runs; "" if nothing is in slices."""
    between = [node for node in way.layouts if node not in region.layouts]
    if between:
        first, dim = between[0], way.layouts[between[0]][0].dim
        several = f"{len(between)} operations" if between[1:] else "one operation"
        return (
            f"between sums, each shard has a slice of dimension {dim}: {several}, such "
            f"as {where(first)}"
        )
    if way.scattered:
        count = len(way.scattered)
        sums = f"{count} sums are" if count > 1 else "one sum is"
        return f"{sums} made in slices, one on each shard, which all gather"
    return ""
