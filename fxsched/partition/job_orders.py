"""Searches for the order of all jobs, and the workers of stages, at the same time.

An order is one of the jobs of all workers, in which each job comes after those whose
results it reads; a worker runs its jobs strictly in this order, and may wait for one
although another is ready. Simulated annealing moves a job, or a stage's jobs of one
direction, to another place of the order, gives all microbatches the order of one, or
moves a stage to another worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, log
from random import Random
from typing import NamedTuple

import networkx as nx

from ..clock.activations import allocations
from ..clock.network import delays
from ..clock.stage_graph import kind_seconds, stage_jobs
from ..jobs.job import Direction
from ..jobs.schedule import Schedule

# Of a step, what a change may cost at first and at the end; less where a walk is short.
HOT, COLD, LONG = 0.05, 0.002, 50  # changes for each job
EARLY = 0.02  # weight of the mean end of workers: of equal steps, the emptier
ABOVE, HOLDS = 0.01, 0.5  # for what is above the limit, and for its share of the limit
FAR, SHIFTS = 6, (1, 2, 3, 5)  # places, for each worker, and of all jobs of a kind
APART = (0.5, 0.7, 0.85, 1.0, 1.15, 1.4)  # microbatches, in shares of an even distance
# Changes by one random number: one job, all of a kind, all microbatches; and of stages,
# by another.
SHIFT, SHIFT_ALL, REPEAT, SWAP, COPY = 0.5, 0.7, 0.78, 0.3, 0.95

Runs = tuple[tuple[int, ...], ...]


class Ordered(NamedTuple):
    """runs: of each stage, the workers that take its microbatches in turns. order: the
    numbers of all jobs. seconds: infinite if a worker holds more than the limit."""

    seconds: float
    runs: Runs
    order: tuple[int, ...]


@dataclass(frozen=True)
class InOrder:
    """An n that is a job's place in one order of all, by direction, stage and
    microbatch."""

    ranks: dict[Direction, tuple[tuple[int, ...], ...]]

    def __call__(self, s: int, b: int, d: Direction) -> int:
        return self.ranks[d][s][b]


class _Placed(NamedTuple):
    """An order, with the workers of stages and of jobs. kept: by worker, bytes that are
    there throughout."""

    order: list[int]
    runs: Runs
    where: list[int]
    kept: list[float]


class JobOrders:
    """Orders of the jobs of stages; see clock.stage_graph for the stages.

    schedule: of any w, n and caps. limit: of bytes that a worker may hold.
    """

    def __init__(
        self, schedule: Schedule, stages: nx.DiGraph[int], limit: float
    ) -> None:
        schedule = replace(schedule, update_every=None)
        jobs = self.jobs = stage_jobs(schedule, stages)
        self.workers, self.limit = schedule.workers, limit
        known, kind = len(jobs.preds), jobs.kind
        self.stage = [jobs.kinds[k][0] for k in kind]
        data = [stages.nodes[s] for s in range(len(stages))]
        self.fixed = [each["weights"] + each.get("state", 0.0) for each in data]
        self.temporary = [each.get("temporary", 0.0) for each in data]
        self.sums = [each.get("fetch", 0.0) for each in data]
        seconds = kind_seconds(stages, jobs.kinds)
        self.seconds = [seconds[k] for k in kind]
        sizes = [data[s]["held"] for s, _ in jobs.kinds]
        takes, gives = allocations(jobs, schedule.release, sizes)
        self.takes, self.gives = [takes[k] for k in kind], [gives[k] for k in kind]
        self.joint = {jobs.kinds[k][0] for k in jobs.joint}
        self.of_kind = [jobs.of(k) for k in range(known)]
        self.of_stage: list[list[int]] = [[] for _ in data]
        for (s, _), numbers in zip(jobs.kinds, self.of_kind, strict=True):
            self.of_stage[s] += numbers
        (head, readers), between = jobs.readers, delays(jobs, stages, None)
        self.after = [set(readers[head[j] : head[j + 1]]) for j in range(len(jobs))]
        self.before: list[list[tuple[int, float]]] = [[] for _ in range(len(jobs))]
        for j, after in enumerate(self.after):
            for t in after:
                self.before[t].append((j, between[kind[j], kind[t]]))
        self.reads = [{p for p, _ in before} for before in self.before]

    def in_order(self, order: Sequence[int]) -> InOrder:
        """The n that makes jobs run in this order."""
        place = [0] * len(order)
        for i, j in enumerate(order):
            place[j] = i
        count, stages = self.jobs.microbatches, max(self.stage) + 1
        ranks = {d: [(0,) * count] * stages for _, d in self.jobs.kinds}
        for (s, d), numbers in zip(self.jobs.kinds, self.of_kind, strict=True):
            own = tuple(place[j] for j in numbers)
            ranks[d][s] = own if len(own) == count else own * count
        return InOrder({d: tuple(rows) for d, rows in ranks.items()})

    def walk(
        self, runs: Runs, order: Sequence[int], changes: int, random: Random
    ) -> Ordered:
        """The best of so many changes of an order and of where stages run."""
        now = _Placed(list(order), runs, *self._where(runs))
        timed = self._timed(now)
        assert timed is not None, "each job comes after those that it reads"
        cost, seconds = timed
        best = Ordered(seconds, runs, tuple(order))
        first = cost
        hot = HOT * min(1.0, changes / (LONG * len(order)))
        for left in range(changes, 0, -1):
            heat = first * max(hot * (left / changes) ** 2, COLD * hot / HOT)
            most = cost - heat * log(1.0 - random.random())
            changed = self._changed(now, random)
            timed = None if changed is None else self._timed(changed)
            if changed is None or timed is None or timed[0] > most:
                continue
            now, (cost, seconds) = changed, timed
            if seconds < best.seconds:
                best = Ordered(seconds, now.runs, tuple(now.order))
        return best

    def _where(self, runs: Runs) -> tuple[list[int], list[float]]:
        """The worker of each job, and the bytes that each worker holds throughout."""
        rows = self.jobs.rows
        own = (runs[s] for s in self.stage)
        where = [each[b % len(each)] for each, b in zip(own, rows, strict=True)]
        kept, largest = [0.0] * self.workers, [0.0] * self.workers
        for each, size, temporary in zip(runs, self.fixed, self.temporary, strict=True):
            for w in each:
                kept[w] += size
                largest[w] = max(largest[w], temporary)
        return where, [a + b for a, b in zip(kept, largest, strict=True)]

    def _timed(self, placed: _Placed) -> tuple[float, float] | None:
        """The seconds of a step with what is added where a worker holds too much, and
        the seconds; None where a job comes before one whose results it reads."""
        order, runs, where, kept = placed
        before, lasts, takes, gives = self.before, self.seconds, self.takes, self.gives
        free, held, most = [0.0] * self.workers, list(kept), list(kept)
        end = [-1.0] * len(order)
        for j in order:
            w = where[j]
            start = free[w]
            for p, late in before[j]:
                ready = end[p]
                if ready < 0:
                    return None
                if where[p] != w:
                    ready += late
                if ready > start:
                    start = ready
            free[w] = end[j] = start + lasts[j]
            held[w] += takes[j]
            if held[w] > most[w]:
                most[w] = held[w]
            held[w] -= gives[j]
        seconds = max(free)
        for s, own in enumerate(runs):
            if len(own) > 1:  # gradients are sent to one worker, which adds them up
                last = max(map(end.__getitem__, self.of_stage[s]))
                seconds = max(seconds, last + self.sums[s])
        cost = seconds + EARLY * sum(free) / self.workers
        above = max(most) / self.limit - 1
        if above > 0:
            return cost * (1 + ABOVE + HOLDS * above), inf
        return cost, seconds

    def _changed(self, placed: _Placed, random: Random) -> _Placed | None:
        """After a random change; None where nothing changes."""
        draw, (order, runs, *_) = random.random(), placed
        if draw < SHIFT:
            changed = self._shifted(order, random)
            return None if changed is None else placed._replace(order=changed)
        if draw < SHIFT_ALL:
            return placed._replace(order=self._all_shifted(order, random))
        if draw < REPEAT:
            return placed._replace(order=self._repeated(order, random))
        other = self._moved(list(runs), random)
        return _Placed(order, other, *self._where(other))

    def _shifted(self, order: list[int], random: Random) -> list[int] | None:
        """A job goes to an earlier or later place, between what it reads and what
        reads it."""
        at = random.randrange(len(order))
        job = order[at]
        far = 1 + int(random.random() * random.random() * FAR * self.workers)
        to = at
        if random.random() < 0.5:
            reads = self.reads[job]
            while to > max(at - far, 0) and order[to - 1] not in reads:
                to -= 1
        else:
            readers = self.after[job]
            while to < min(at + far, len(order) - 1) and order[to + 1] not in readers:
                to += 1
        if to == at:
            return None
        changed = list(order)
        changed.insert(to, changed.pop(at))
        return changed

    def _all_shifted(self, order: list[int], random: Random) -> list[int]:
        """All jobs of one kind go so many places."""
        kind = self.jobs.kind[random.choice(order)]
        far = random.choice((-1, 1)) * (random.choice(SHIFTS) + 0.5)
        of = self.jobs.kind
        keys = [i + far if of[j] == kind else i for i, j in enumerate(order)]
        return [order[i] for i in sorted(range(len(order)), key=keys.__getitem__)]

    def _repeated(self, order: list[int], random: Random) -> list[int]:
        """All microbatches have the order of one, at even distances."""
        kind, rows, count = self.jobs.kind, self.jobs.rows, self.jobs.microbatches
        joint = self.jobs.joint
        like = random.randrange(count)
        each = random.choice(APART) * len(order) / count
        place = {kind[j]: i for i, j in enumerate(order) if rows[j] == like}
        keys = [
            i if kind[j] in joint else place[kind[j]] + (rows[j] - like) * each
            for i, j in enumerate(order)
        ]
        return [order[i] for i in sorted(range(len(order)), key=keys.__getitem__)]

    def _moved(self, runs: list[tuple[int, ...]], random: Random) -> Runs:
        """A stage goes to another worker, two change places, or one more worker takes
        microbatches of a stage."""
        s, t, w = (random.randrange(n) for n in (len(runs), len(runs), self.workers))
        draw = random.random()
        if draw < SWAP:
            runs[s], runs[t] = runs[t], runs[s]
        elif draw < COPY or s in self.joint or w in runs[s]:
            runs[s] = (w,)
        else:
            runs[s] = (*runs[s], w)
        return tuple(runs)
