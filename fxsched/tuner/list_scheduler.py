"""Builds the order of every worker's jobs by a clock that looks one job ahead.

The rules are those of Zero Bubble's heuristic (Qi et al. 2023, arXiv 2401.10241,
section 3.1): as many F first as memory allows, then F and B as they come, and W where
a worker would wait for them or lacks memory. Knobs say how eagerly.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from ..jobs.job import Direction
from .evaluate_order import CLOSE, Orders
from .ordering_problem import OrderingProblem

FORWARD, BACKWARD, WEIGHT, _ = Direction
FIRST = ("late", "oldest", "early", "late of a group", "early of a group")


class Knobs(NamedTuple):
    """How jobs are chosen.

    fit: W begins where the worker would wait for this share of it or longer.
    full: the same where F waits for memory.
    patience: F doesn't begin if another job comes within this share of it.
    idle: a worker that would be idle for longer than this share of its work, and than
        any other so far, runs W at any rate.
    turns: after B comes F, if it can run, even if there is another B.
    first: which F: of the latest stage, of the oldest microbatch, of the earliest
        stage; or that of the oldest group of as many microbatches as workers.
    deep: B of the earliest stage first, instead of the oldest microbatch.
    spare: F leaves room for so many microbatches of the worker's later stages.
    room: the share of the room that is used.
    """

    fit: float = 1.0
    full: float = 0.0
    patience: float = 0.2
    idle: float = inf
    turns: bool = False
    first: str = "oldest"
    deep: bool = False
    spare: int = 1
    room: float = 1.0


def fill(problem: OrderingProblem, knobs: Knobs) -> Orders | None:
    """The orders that the rules give; None if there is too little memory for them."""
    return _Filler(problem, knobs).run()


class _Filler:
    def __init__(self, problem: OrderingProblem, knobs: Knobs) -> None:
        jobs, workers = problem.jobs, problem.jobs.workers
        self.problem, self.knobs, self.compute = problem, knobs, jobs.worker
        self.kind, self.rows, self.seconds = jobs.kind, jobs.rows, problem.seconds
        self.succs, self.takes, self.gives = problem.succs, problem.takes, problem.gives
        self.directions = [d for _, d in jobs.kinds]
        self.missing = list(jobs.awaited)
        self.when = [0.0] * len(jobs)
        self.events: list[tuple[float, int]] = []  # ends of j; arrivals as -1 - j
        # ready jobs: F by kind, B by rank, W in the order of their B
        self.forward: list[dict[int, list[int]]] = [{} for _ in range(workers)]
        self.back: list[list[tuple[int, int]]] = [[] for _ in range(workers)]
        self.weight: list[deque[int]] = [deque() for _ in range(workers)]
        self.coming: list[list[float]] = [[] for _ in range(workers)]
        self.free, self.turn = [True] * workers, [True] * workers
        self.idle, self.last = [0.0] * workers, [-1.0] * workers
        self.held, self.most_idle = [0.0] * workers, knobs.idle * problem.work
        self.orders: list[list[int]] = [[] for _ in range(workers)]
        self.limit = self._limits()

    def _limits(self) -> list[list[float]]:
        """By worker and kind of F, how much may be held when it begins."""
        problem, K = self.problem, len(self.seconds)
        limits = []
        on: list[set[int]] = [set() for _ in problem.room]
        for j, worker in enumerate(self.compute):
            if self.takes[self.kind[j]]:
                on[worker].add(self.kind[j])
        for kinds, room in zip(on, problem.room, strict=True):
            sizes = [self.takes[k] for k in kinds]
            room = max(room * self.knobs.room, min(room, 2 * sum(sizes)))
            line, later = [inf] * K, 0.0
            for k in sorted(kinds, reverse=True):  # F are numbered by stage
                line[k] = room * (1 + CLOSE) - later - self.takes[k]
                later += self.knobs.spare * self.takes[k]
            limits.append(line)
        return limits

    def run(self) -> Orders | None:
        for j, missing in enumerate(self.missing):
            if not missing:
                self.arrive(j)
        now, todo = 0.0, set(range(self.problem.jobs.workers))
        while True:
            for w in sorted(todo):
                if self.free[w]:
                    j = self.choose(w, now)
                    if j >= 0:
                        self.start(j, w, now)
            if not self.events:
                break
            now, todo = self.events[0][0], set()
            while self.events and self.events[0][0] == now:
                j = heappop(self.events)[1]
                todo.add(self.arrive(-1 - j) if j < 0 else self.finish(j))
        complete = sum(map(len, self.orders)) == len(self.problem.jobs)
        return tuple(map(tuple, self.orders)) if complete else None

    def choose(self, w: int, now: float) -> int:
        """Takes the job to start; -1 to wait for what comes next."""
        coming, knobs = self.coming[w], self.knobs
        while coming and coming[0] <= now:
            heappop(coming)
        wait = coming[0] - now if coming else inf
        f, full = self.next_forward(w)
        if self.back[w] and not (knobs.turns and f >= 0 and not self.turn[w]):
            return heappop(self.back[w])[1]
        if f >= 0 and wait >= knobs.patience * self.seconds[self.kind[f]]:
            return heappop(self.forward[w][self.kind[f]])
        if self.weight[w]:
            taken = self.seconds[self.kind[self.weight[w][0]]]
            most_idle = f < 0 and self.idle[w] + wait > self.most_idle
            if wait >= (knobs.full if full else knobs.fit) * taken or most_idle:
                return self.weight[w].popleft()
        return -1

    def next_forward(self, w: int) -> tuple[int, bool]:
        """The F to start, or -1, and whether one waits for memory."""
        best, least, full = -1, inf, False
        for k, ready in self.forward[w].items():
            if not ready:
                continue
            if self.held[w] > self.limit[w][k]:
                full = True
                continue
            rank = self.rank(k, self.rows[ready[0]])
            if rank < least:
                best, least = ready[0], rank
        return best, full and best < 0

    def rank(self, k: int, b: int) -> float:
        """Of an F among those that are ready on its worker; F's kind is its stage."""
        jobs, first = self.problem.jobs, self.knobs.first
        stages, m = len(self.seconds), jobs.microbatches
        if first == "oldest":
            return b * stages - k
        if first.endswith("group"):
            group = b // jobs.workers * stages * m
            return group + (k if first.startswith("early") else stages - k) * m + b
        return (k if first == "early" else stages - k) * m + b

    def start(self, j: int, w: int, now: float) -> None:
        k = self.kind[j]
        if self.last[w] >= 0:
            self.idle[w] += now - self.last[w]
            self.most_idle = max(self.most_idle, self.idle[w])
        self.free[w], self.turn[w] = False, self.directions[k] is not BACKWARD
        self.held[w] += self.takes[k]
        self.orders[w].append(j)
        end = self.last[w] = now + self.seconds[k]
        heappush(self.events, (end, j))
        for t, delay in self.succs[j]:
            other = self.compute[t]
            there = end + delay if other != w else end
            self.when[t] = there = max(there, self.when[t])
            self.missing[t] -= 1
            if not self.missing[t]:
                heappush(self.events, (there, -1 - t))
                if other != w or there > end:
                    heappush(self.coming[other], there)

    def arrive(self, j: int) -> int:
        """A job is ready now; its worker."""
        k, w = self.kind[j], self.compute[j]
        direction = self.directions[k]
        if direction is FORWARD:
            heappush(self.forward[w].setdefault(k, []), j)
        elif direction is WEIGHT:
            self.weight[w].append(j)
        else:  # B of the later stage has the smaller kind
            b = self.rows[j]
            rank = b - k * len(self.compute) if self.knobs.deep else j
            heappush(self.back[w], (rank, j))
        return w

    def finish(self, j: int) -> int:
        """A job has ended; its worker, which is free now."""
        w = self.compute[j]
        self.free[w] = True
        self.held[w] -= self.gives[self.kind[j]]
        return w
