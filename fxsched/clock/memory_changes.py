"""When workers take and let go of bytes in a step, kind by kind; see memory.py."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..jobs.job import Direction
from ..jobs.schedule import Schedule
from .activations import allocations, holders
from .jobs import Jobs
from .weight_fetches import source_of
from .weight_groups import WeightGroup

WEIGHTS, VERSIONS, FETCHED, GRADIENTS, STATE, ACTIVATIONS = range(6)
BEFORE, START, END, AFTER = range(4)  # when, about a job

Change = tuple[int, int, int, float]  # when, the worker, the kind, bytes
Version = tuple[int, int, int]  # group, updates that it has seen, the worker it is on
Copy = tuple[Version, float]  # of weights, so many velocities away from them


@dataclass(frozen=True)
class StepChanges:
    """A step's jobs and weights, and the changes that they make.

    order: numbers of jobs; a job's place in it, times four, says when it is.
    reads, gives: groups that each kind of jobs reads, and gives gradients of.
    """

    schedule: Schedule
    jobs: Jobs
    order: Sequence[int]
    groups: Mapping[int, WeightGroup]
    reads: list[list[int]]
    gives: list[list[int]]
    prefetch: int

    @cached_property
    def every(self) -> int:
        """For how many microbatches an update is; the loop's is for all."""
        return self.schedule.update_every or self.jobs.microbatches

    @cached_property
    def regular(self) -> list[tuple[int, int, int, int]]:
        """Place, kind, microbatch and worker of each F, B and W, in order."""
        jobs, first = self.jobs, self.jobs.regular
        return [
            (place, jobs.kind[number], jobs.rows[number], jobs.worker[number])
            for place, number in enumerate(self.order)
            if number < first
        ]

    @cached_property
    def updates(self) -> list[tuple[int, int, int, int]]:
        """Place, stage, number in the call and worker of each U, in order."""
        first, worker = self.jobs.regular, self.jobs.worker
        found = []
        for place, number in enumerate(self.order):
            if number >= first:
                stage, last, _ = self.jobs.job(number)
                found.append((place, stage, last // self.every, worker[number]))
        return found

    @cached_property
    def of_stage(self) -> dict[int, list[int]]:
        """The groups that each stage's U updates."""
        found: dict[int, list[int]] = {}
        for number, group in self.groups.items():
            if group.gradients:
                found.setdefault(group.stage, []).append(number)
        return found

    def resident(self) -> Iterator[Change]:
        """What stays."""
        for group in self.groups.values():
            drifts = self.updates and self.schedule.stage_drift(group.stage) is not None
            for worker in group.owners:
                yield -1, worker, WEIGHTS, group.bytes
            for worker in group.updaters:  # a velocity is as large as a gradient
                yield -1, worker, STATE, group.state + group.gradients * bool(drifts)

    def activations(self, held: list[float], kept: float) -> Iterator[Change]:
        """On the worker of B."""
        release = self.schedule.release
        holder = holders(self.jobs, release).tolist()
        taken, given_back = allocations(self.jobs, release, held, kept)
        for place, kind, _, _ in self.regular:
            if taken[kind] or given_back[kind]:
                worker = self.jobs.worker[holder[self.order[place]]]
                yield 4 * place + START, worker, ACTIVATIONS, taken[kind]
                yield 4 * place + END, worker, ACTIVATIONS, -given_back[kind]

    def read_whole(self, edges: Mapping[tuple[int, int], float]) -> Iterator[Change]:
        """What all microbatches of a stage read as it is, by edges of stages: on each
        of its workers, from its first job to its last; and the sum of its gradients
        there, from the first B to the last."""
        for (_, stage), size in edges.items():
            spans: dict[tuple[int, bool], list[int]] = {}
            for place, kind, _, worker in self.regular:
                reader, direction = self.jobs.kinds[kind]
                if reader == stage:
                    for back in {False, direction is not Direction.FORWARD}:
                        spans.setdefault((worker, back), [place, place])[1] = place
            for (worker, _), (first, last) in spans.items():
                yield 4 * first + START, worker, ACTIVATIONS, size
                yield 4 * last + END, worker, ACTIVATIONS, -size

    def gradients(self) -> Iterator[Change]:
        """A worker's sum, where all of them meet, and what that is cast to."""
        sums: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}
        for place, kind, b, worker in self.regular:
            for g in self.gives[kind]:
                by_worker = sums.setdefault((g, b // self.every), {})
                by_worker[worker] = by_worker.get(worker, (place, 0))[0], place
        updated = {(s, k, w): place for place, s, k, w in self.updates}
        first: dict[tuple[int, int], int] = {}
        for place, stage, k, _ in self.updates:
            first.setdefault((stage, k), place)
        for (g, k), by_worker in sorted(sums.items()):  # as programs add them up
            group = self.groups[g]
            size, root = group.gradients, group.root
            if self.schedule.average_every is not None:  # each takes its own step
                for worker, (start, _) in by_worker.items():
                    end = updated[group.stage, k, worker]
                    yield 4 * start + START, worker, GRADIENTS, size
                    yield 4 * end + END, worker, GRADIENTS, -group.gradients
                continue
            for worker, (start, end) in by_worker.items():
                yield 4 * start + START, worker, GRADIENTS, size
                if worker != root:
                    yield 4 * end + END, worker, GRADIENTS, -size
                    yield 4 * end + END, root, GRADIENTS, size
            last = max(end for _, end in by_worker.values())
            met = 4 * last + END
            if list(by_worker) != [root]:
                met = self.summed(root, last)
                if self.updates:
                    met = min(met, 4 * first[group.stage, k] + START)
                yield met, root, GRADIENTS, -size * (len(by_worker) - 1)
            for worker in group.updaters:
                if worker != root:
                    yield met, worker, GRADIENTS, group.gradients
                if self.updates:
                    end = updated[group.stage, k, worker]
                    yield 4 * end + END, worker, GRADIENTS, -group.gradients

    def summed(self, root: int, last: int) -> int:
        """When a worker adds up sums, the last of which is there after a job: after
        its own next job, in the meantime of which they come."""
        places = self._with_updates[root]
        i = bisect_right(places, last)
        return 4 * (places[i] if i < len(places) else last) + AFTER

    @cached_property
    def _with_updates(self) -> list[list[int]]:
        """The places of all jobs of each worker."""
        places = [list(own) for own in self._places]
        for place, _, _, worker in self.updates:
            insort(places[worker], place)
        return places

    @cached_property
    def _places(self) -> list[list[int]]:
        """The places of each worker's F, B and W."""
        places: list[list[int]] = [[] for _ in range(self.jobs.workers)]
        for place, _, _, worker in self.regular:
            places[worker].append(place)
        return places

    def _replaced(self) -> Iterator[tuple[Version, int]]:
        """Versions in whose place an update, or its renewal of a copy, puts the next,
        and the update's place."""
        for place, stage, k, worker in self.updates:
            for g in self.of_stage.get(stage, ()):
                group = self.groups[g]
                if worker in group.updaters:
                    spread = group.updaters != group.owners
                    for owner in group.owners if spread else (worker,):
                        yield (g, k, owner), place

    @cached_property
    def copied(self) -> tuple[dict[tuple[int, int], Copy], dict[Copy, list[int]]]:
        """Reads of older versions that are not in place, by the job's place and the
        group; and of each such version, when it is copied and last read."""
        reads: dict[tuple[int, int], Copy] = {}
        copies: dict[Copy, list[int]] = {}
        stale = self.schedule.version is not None or self.schedule.drift is not None
        if not (stale and self.updates):
            return reads, copies
        replaced: dict[Version, int] = dict(self._replaced())
        live = _Live(replaced)
        for place, kind, b, here in self.regular:
            number = self.order[place]
            seen, gap = self.jobs.version(number), self.jobs.gap(number)
            if seen == b // self.every and not gap:
                continue
            for g in self.reads[kind]:
                source = self._source(g, place, here)
                in_place = source == here and live(g, source, place) == seen
                if self.groups[g].gradients and (gap or not in_place):
                    key = reads[place, g] = (g, seen, source), gap
                    copies.setdefault(key, [place, place])[1] = place
        for key, times in copies.items():
            made = min(times[0], replaced.get(key[0], times[0]))
            copies[key] = [4 * made + BEFORE, 4 * times[1] + END]
        return reads, copies

    def _source(self, group: int, place: int, here: int) -> int:
        keeper = self.jobs.keeper[self.order[place]]
        return source_of(self.groups[group].owners, keeper, here)

    def versions(self) -> Iterator[Change]:
        """Copies of older versions."""
        for ((g, _, worker), _), (made, last) in self.copied[1].items():
            yield made, worker, VERSIONS, self.groups[g].bytes
            yield last, worker, VERSIONS, -self.groups[g].bytes

    def renewals(self) -> Iterator[Change]:
        """New weights on their way to copies, one after the other."""
        for when, g, source, to in self._renewed():
            size, sent = self.groups[g].bytes, self.schedule.version is not None
            if self.updates and sent:
                yield when, source, VERSIONS, size
                yield when, source, VERSIONS, -size
            yield when, to, FETCHED, size
            yield when, to, FETCHED, -size

    def _renewed(self) -> Iterator[tuple[int, int, int, int]]:
        """When, which group, from which worker and to which: after the update; if the
        loop steps, before the first job that reads it."""
        for place, stage, _, worker in self.updates:
            for g in self.of_stage.get(stage, ()):
                for owner in self.groups[g].owners:
                    if (worker,) == self.groups[g].updaters and owner != worker:
                        yield 4 * place + START, g, worker, owner
        if self.updates or self.schedule.u is None:
            return
        done = {(g, w) for g, group in self.groups.items() for w in group.updaters}
        for place, kind, _, here in self.regular:
            for g in self.reads[kind]:
                owner = self._source(g, place, here)
                if (g, owner) not in done:
                    done.add((g, owner))
                    yield 4 * place + BEFORE, g, self.groups[g].root, owner

    def fetches(self) -> Iterator[Change]:
        """Weights that others keep, while the jobs in a row that read them last."""
        made: dict[Version | Copy, int] = {}
        for (g, k, owner), place in self._replaced():
            made[g, k + 1, owner] = 4 * place + END
        for key, (when, _) in self.copied[1].items():
            made[key] = when
        at_hand: list[dict[int, Version | Copy]]
        at_hand = [{} for _ in range(self.jobs.workers)]
        earlier = [0] * self.jobs.workers
        for place, kind, b, here in self.regular:
            before, at_hand[here] = at_hand[here], {}
            start = self._asked(here, earlier[here])
            earlier[here] += 1
            for g in self.reads[kind]:
                source = self._source(g, place, here)
                if source == here:
                    continue
                newest = g, b // self.every, source
                value = self.copied[0].get((place, g), newest)
                at_hand[here][g] = value
                if before.get(g) != value:
                    when = max(start, made.get(value, start))
                    yield when, here, FETCHED, self.groups[g].bytes
                else:  # it stays for one job more
                    last = self._places[here][earlier[here] - 2]
                    yield 4 * last + END, here, FETCHED, self.groups[g].bytes
                yield 4 * place + END, here, FETCHED, -self.groups[g].bytes

    def _asked(self, worker: int, number: int) -> int:
        """When weights are asked for that a worker's job of this number reads."""
        if number < self.prefetch:
            return 0
        return 4 * self._places[worker][number - self.prefetch] + BEFORE


class _Live:
    """How many updates there were of a group on a worker, before a place."""

    def __init__(self, replaced: Mapping[Version, int]) -> None:
        self.places: dict[tuple[int, int], list[int]] = {}
        for (g, _, worker), place in replaced.items():
            self.places.setdefault((g, worker), []).append(place)

    def __call__(self, group: int, worker: int, place: int) -> int:
        return bisect_right(self.places.get((group, worker), []), place)
