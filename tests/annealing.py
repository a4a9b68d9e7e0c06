"""Simulated annealing over the blocks of a model, as a yardstick for the planner.

It shares no code with the planner or the clock: it has its own moves, of the stage and
the worker of each block, the order of jobs and the caps, and its own list scheduler,
which times them.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

Edge = tuple[int, int, float]  # from a block to another, and seconds between workers
Entry = tuple[float, float, int, int, int]  # two ranks; stage, microbatch, direction


@dataclass(frozen=True)
class Blocks:
    """Blocks with seconds of F and B of a microbatch, in an order of data flow.

    once: blocks that run once, on the whole batch, each of which is a stage of its own;
        phase: how often rows meet before a block: no stage has two of them.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    edges: Sequence[Edge]
    once: frozenset[int]
    phase: Sequence[int]
    split: bool = False  # whether half of B is W, a job of its own

    @property
    def directions(self) -> int:
        return 3 if self.split else 2


@dataclass(frozen=True)
class State:
    """The stage of each block; of each stage, its worker, its cap, and the ranks of F,
    B and, if there is one, W."""

    stage: tuple[int, ...]
    worker: tuple[int, ...]
    cap: tuple[int, ...]
    first: tuple[float, ...]
    by_stage: bool  # whether ranks come before microbatches


def order(blocks: Blocks, state: State) -> list[int] | None:
    """The stages in an order of data flow; None if they read each other in a circle."""
    count = len(state.worker)
    after: list[set[int]] = [set() for _ in range(count)]
    for a, b, _ in blocks.edges:
        if state.stage[a] != state.stage[b]:
            after[state.stage[a]].add(state.stage[b])
    missing = [0] * count
    for readers in after:
        for r in readers:
            missing[r] += 1
    ready, found = [s for s in range(count) if not missing[s]], []
    while ready:
        s = ready.pop()
        found.append(s)
        for r in after[s]:
            missing[r] -= 1
            if not missing[r]:
                ready.append(r)
    return found if len(found) == count else None


def step(blocks: Blocks, state: State, microbatches: int, workers: int) -> float:
    """Seconds of a step; infinite for a circle, or caps that stop it."""
    if order(blocks, state) is None:
        return math.inf
    count = len(state.worker)
    f, b = [0.0] * count, [0.0] * count
    for u, s in enumerate(state.stage):
        f[s] += blocks.forward[u]
        b[s] += blocks.backward[u]
    ways, last = blocks.directions, blocks.directions - 1
    if blocks.split:
        b = [seconds / 2 for seconds in b]
    once = {state.stage[u] for u in blocks.once}
    between: dict[tuple[int, int], float] = {}
    for u, v, seconds in blocks.edges:
        key = state.stage[u], state.stage[v]
        if key[0] != key[1]:
            between[key] = max(between.get(key, 0.0), seconds)
    makers: list[list[int]] = [[] for _ in range(count)]
    readers: list[list[int]] = [[] for _ in range(count)]
    for s, r in between:
        makers[r].append(s)
        readers[s].append(r)
    every = range(microbatches)

    def rows(s: int) -> Sequence[int]:
        return (0,) if s in once else every

    missing: dict[tuple[int, int, int], int] = {}
    for s in range(count):
        for m in rows(s):
            waits = sum(len(rows(p)) if s in once else 1 for p in makers[s])
            missing[s, m, 0] = waits
            back = [r for r in readers[s] if b[r]]
            missing[s, m, 1] = 1 + sum(len(rows(r)) if s in once else 1 for r in back)
            if blocks.split:
                missing[s, m, 2] = 1
    queues: list[list[Entry]] = [[] for _ in range(workers)]
    free, inside = [True] * workers, [0] * count
    held: list[list[Entry]] = [[] for _ in range(count)]

    def push(s: int, m: int, d: int) -> None:
        rank = state.first[ways * s + d]
        key = (rank, m) if state.by_stage else (m, rank)
        heapq.heappush(queues[state.worker[s]], (*key, s, m, d))

    events: list[tuple[float, int, int, int, int]] = []  # time, 0 end or 1 arrival, job
    for s in range(count):
        for m in rows(s):
            if not missing[s, m, 0]:
                push(s, m, 0)
    now, left = 0.0, len([1 for job in missing if job[2] == 0 or b[job[0]]])
    while True:
        for w in range(workers):
            while free[w] and queues[w]:
                entry = heapq.heappop(queues[w])
                *_, s, m, d = entry
                if d == 0 and s not in once and b[s] and inside[s] >= state.cap[s]:
                    held[s].append(entry)
                    continue
                inside[s] += d == 0
                free[w] = False
                left -= 1
                heapq.heappush(events, (now + (b[s] if d else f[s]), 0, s, m, d))
        if not events:
            return now if left == 0 else math.inf
        now = events[0][0]
        while events and events[0][0] == now:
            _, arrives, s, m, d = heapq.heappop(events)
            if not arrives:
                free[state.worker[s]] = True
                if d == last:
                    inside[s] -= 1
                    for entry in held[s]:
                        heapq.heappush(queues[state.worker[s]], entry)
                    held[s].clear()
                reached = [(r, 0) for r in readers[s]] if d == 0 else []
                if d == 0 and b[s]:
                    reached.append((s, 1))
                if d == 1:
                    reached = [(p, 1) for p in makers[s] if b[p]]
                    reached += [(s, 2)] * blocks.split
                for r, e in reached:
                    pair = (s, r) if d == 0 else (r, s)
                    late = 0.0
                    if r != s and state.worker[r] != state.worker[s]:
                        late = between[pair]
                    if s in once and r not in once:
                        targets: Sequence[int] = every
                    else:
                        targets = (0,) if r in once else (m,)
                    for k in targets:
                        heapq.heappush(events, (now + late, 1, r, k, e))
                continue
            missing[s, m, d] -= 1
            if not missing[s, m, d]:
                push(s, m, d)


def anneal(
    blocks: Blocks,
    microbatches: int,
    workers: int,
    fits: Callable[[State], bool],
    seconds: float,
    seed: int = 0,
) -> tuple[float, State, int]:
    """The shortest step that is found in so many seconds, its state, and how many were
    timed. fits: whether a state is within the memory."""
    random, began = Random(seed), time.perf_counter()
    state = _even(blocks, workers, microbatches)
    now = best = step(blocks, state, microbatches, workers)
    kept, timed = state, 1
    while (part := (time.perf_counter() - began) / seconds) < 1:
        heat = 0.03 * best * (1 - part) ** 2 + 1e-12
        other = _changed(blocks, state, random, workers, microbatches)
        if other is None:
            continue
        taken = step(blocks, other, microbatches, workers)
        timed += 1
        if taken > now and random.random() > math.exp((now - taken) / heat):
            continue
        if not fits(other):
            continue
        state, now = other, taken
        if taken < best:
            best, kept = taken, other
    return best, kept, timed


def _even(blocks: Blocks, workers: int, microbatches: int) -> State:
    """Stages of about equal work along the blocks, one for each worker and phase."""
    work = [f + b for f, b in zip(blocks.forward, blocks.backward, strict=True)]
    share, done, names = sum(work) / workers, 0.0, []
    for u, seconds in enumerate(work):
        place = min(int((done + seconds / 2) / share), workers - 1)
        done += seconds
        names.append((u, -1) if u in blocks.once else (place, blocks.phase[u]))
    known = {name: i for i, name in enumerate(dict.fromkeys(names))}
    stage = tuple(known[name] for name in names)
    worker = tuple(0 if p < 0 else k for k, p in known)
    count = len(worker)
    ranks = [(s, 2 * count - s, 1e3)[: blocks.directions] for s in range(count)]
    first = tuple(float(x) for each in ranks for x in each)
    return State(stage, worker, (microbatches,) * count, first, False)


def _changed(
    blocks: Blocks, state: State, random: Random, workers: int, microbatches: int
) -> State | None:
    count, draw, ways = len(state.worker), random.random(), blocks.directions
    s = random.randrange(count)
    if draw < 0.45:  # a block, and maybe those near it, goes to a neighbour's stage
        crossing = [(a, b) for a, b, _ in blocks.edges if _movable(blocks, state, a, b)]
        if not crossing:
            return None
        stage = list(state.stage)
        a, b = random.choice(crossing)
        here, there = stage[a], stage[b]
        for _ in range(random.randrange(1, 4)):
            if random.random() < 0.5:
                stage[a] = there
            else:
                stage[b] = here
            crossing = [
                (x, y) for x, y in crossing if (stage[x], stage[y]) == (here, there)
            ]
            if not crossing:
                break
            a, b = random.choice(crossing)
        return _compact(state, stage, ways)
    if draw < 0.6:
        worker = list(state.worker)
        worker[s] = random.randrange(workers)
        return replace(state, worker=tuple(worker))
    if draw < 0.7 and count > 1:
        worker, t = list(state.worker), random.randrange(count)
        worker[s], worker[t] = worker[t], worker[s]
        return replace(state, worker=tuple(worker))
    if draw < 0.8:  # cut a stage
        inside = [u for u in range(len(state.stage)) if state.stage[u] == s]
        if len(inside) < 2:
            return None
        later = set(inside[random.randrange(1, len(inside)) :])
        stage = [count if u in later else x for u, x in enumerate(state.stage)]
        return replace(
            state,
            stage=tuple(stage),
            worker=(*state.worker, random.randrange(workers)),
            cap=(*state.cap, state.cap[s]),
            first=(*state.first, *_nearby(state.first[ways * s : ways * (s + 1)])),
        )
    if draw < 0.88:  # join two
        crossing = [(a, b) for a, b, _ in blocks.edges if _movable(blocks, state, a, b)]
        if not crossing:
            return None
        a, b = random.choice(crossing)
        gone, into = state.stage[b], state.stage[a]
        return _compact(state, [into if x == gone else x for x in state.stage], ways)
    if draw < 0.93:
        cap = list(state.cap)
        cap[s] = random.randrange(1, microbatches + 1)
        return replace(state, cap=tuple(cap))
    if draw < 0.98:
        first, i = list(state.first), random.randrange(ways * count)
        first[i] = random.uniform(0, 2 * count)
        return replace(state, first=tuple(first))
    return replace(state, by_stage=not state.by_stage)


def _movable(blocks: Blocks, state: State, a: int, b: int) -> bool:
    apart = state.stage[a] != state.stage[b] and blocks.phase[a] == blocks.phase[b]
    return apart and not blocks.once & {a, b}


def _nearby(ranks: Sequence[float]) -> list[float]:
    """Of the later part of a stage: F after the first part's, the others before."""
    return [ranks[0] + 0.5, *(rank - 0.5 for rank in ranks[1:])]


def _compact(state: State, stage: Sequence[int], ways: int) -> State:
    """The state without stages that have no blocks."""
    left = sorted(set(stage))
    new = {s: i for i, s in enumerate(left)}
    return State(
        tuple(new[s] for s in stage),
        tuple(state.worker[s] for s in left),
        tuple(state.cap[s] for s in left),
        tuple(x for s in left for x in state.first[ways * s : ways * (s + 1)]),
        state.by_stage,
    )
