"""What one worker's program shows of averages of replicas.

A replica is what a worker's own updates made of a group of weights. An average takes
those of all workers that keep the group, each once, at the same version, and goes in
the place of all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import fx

from ..ir import ops
from ..ir.graphs import arguments, original
from .check_updates import UpdateFault, WeightReads


class Part(NamedTuple):
    """What is averaged, or an average: of which group, after how many updates, and
    whether with what the optimizer has of it.

    what: "replica"; "average"; or "centre", a copy from the start of the call.
    """

    what: str
    group: int
    version: int | None
    moments: bool


Source = Part | int  # made here, or the tag of the message that it came with


class Averaged(NamedTuple):
    """An average that a worker makes ("average"), or puts in the place of its replica
    ("take").

    owners: the workers with replicas. sources: what it takes. centre: that of elastic
    averaging, and the version that this should be of, -1 for none.
    """

    what: str
    group: int
    version: int
    moments: bool
    owners: tuple[int, ...]
    sources: tuple[Source | None, ...]
    centre: Source | None
    before: int


class AverageReads:
    """The averages in a program."""

    def __init__(self, weights: WeightReads, nodes: list[fx.Node]) -> None:
        self.weights, self.nodes, self.all = weights, nodes, weights.all

    def part(self, value: fx.Node) -> Part | None:
        """What a value is of these; None for others."""
        value = original(value)
        if value.target is ops.replica:
            _, group, moments, copied, weights = arguments(value)
            if weights.meta.get("group") != group:
                return None
            version = self.weights.version(weights)
            return Part("centre" if copied else "replica", group, version, moments)
        if value.target is ops.average:
            for each in arguments(value)[2:]:
                own = self.part(each)
                if own is not None:
                    return own._replace(what="average")
        return None

    def averaged(self) -> Iterator[Averaged]:
        """The averages here. Raises UpdateFault unless each replica gets those that it
        should, once."""
        every, rank = self.all.average_every, self.weights.rank
        if every is None:
            return
        wanted = Counter(
            (number, version)
            for number, group in enumerate(self.weights.groups)
            if any(group.trained) and rank in group.owners
            for version in range(every, self.all.updates + 1, every)
        )
        for node in self.nodes:
            if node.target is ops.average:
                yield self._average(node)
            elif node.target is ops.take:
                taken = self._take(node)
                key = taken.group, taken.version
                if not wanted[key]:
                    raise UpdateFault(
                        f"worker {rank} takes an average of group {taken.group} after "
                        f"{taken.version} updates once more than it should"
                    )
                wanted[key] -= 1
                yield taken
        for number, version in wanted.elements():
            raise UpdateFault(
                f"worker {rank} takes no average of group {number} after {version} "
                "updates"
            )

    def _average(self, node: fx.Node) -> Averaged:
        _, centre, *replicas = arguments(node)
        part = self.part(node)
        if part is None or part.version is None:
            raise UpdateFault(
                f"worker {self.weights.rank}: {node.meta['task']} averages what are no "
                "replicas"
            )
        return self._record(node, part.group, part.version, tuple(replicas), centre)

    def _take(self, node: fx.Node) -> Averaged:
        _, group, elastic, weights, new, centre = arguments(node)
        version = self.weights.version(weights)
        if version is None or weights.meta.get("group") != group:
            raise UpdateFault(
                f"worker {self.weights.rank}: {node.meta['task']} puts an average in "
                f"the place of {weights}"
            )
        moved = None if elastic is None else centre
        return self._record(node, group, version, (new,), moved)

    def _record(
        self,
        node: fx.Node,
        group: int,
        version: int,
        sources: tuple[fx.Node, ...],
        centre: fx.Node | None,
    ) -> Averaged:
        elastic, last = self.all.elastic, version == self.all.updates
        what = "average" if node.target is ops.average else "take"
        ends = what == "take" and last  # all are the centre then
        before = version - (self.all.average_every or 0)
        return Averaged(
            what,
            group,
            version,
            last or not elastic,
            self.weights.groups[group].owners,
            tuple(map(self._source, sources)),
            None if centre is None else self._source(centre),
            before if elastic and not ends else -1,
        )

    def _source(self, value: fx.Node) -> Source | None:
        value = original(value)
        if value.target in (ops.recv, ops.fetch):
            tag = value.kwargs["tag"]
            assert isinstance(tag, int)
            return tag
        return self.part(value)


Resolve = Callable[[Source | None], tuple[int, Part | None]]


def average_fault(rank: int, each: Averaged, resolve: Resolve) -> str | None:
    """What is wrong with an average, by what its messages bring; None for nothing.

    resolve: the worker that made a source, and what it is.
    """
    group, version = each.group, each.version
    found = [resolve(source) for source in each.sources]
    what = "replica" if each.what == "average" else "average"
    part = Part(what, group, version, each.moments)
    wanted = [(worker, part) for worker in each.owners]
    if each.what == "take":
        wanted = [(found[0][0], part)]
    if found != wanted:
        return (
            f"worker {rank}: the {each.what} of group {group} after {version} updates "
            f"has {[_text(*pair) for pair in found]}, not "
            f"{[_text(*pair) for pair in wanted]}"
        )
    centre = None if each.centre is None else resolve(each.centre)[1]
    plain = None if centre is None else centre._replace(moments=False)
    start = Part("centre", group, 0, False)
    later = Part("average", group, each.before, False)
    should = None if each.before < 0 else later if each.before else start
    if plain != should:
        return (
            f"worker {rank}: the {each.what} of group {group} after {version} updates "
            f"has {_text(rank, centre)} for its centre, not {_text(rank, should)}"
        )
    return None


def _text(worker: int, part: Part | None) -> str:
    if part is None:
        return f"something else of worker {worker}"
    return f"{part.what} of worker {worker} after {part.version} updates"
