"""Table 1 row by row, and the counterexample to its bound on the throughput."""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop, heappush

import pytest

from fxsched import Direction, Job, Schedule, schedules, simulate

from .. import table1

FORWARD, BACKWARD, *_ = Direction


def test_every_row_of_table_1_holds() -> None:
    assert [row for row in table1.rows() if not row.holds] == []


def test_table_1_shows_what_was_corrected() -> None:
    lines = [" ".join(line.split()) for line in table1.text().splitlines()]
    assert "PP S=W=8 B=64, no cap activations min(S, B) 8 22, more" in lines
    assert "folded S=16 W=8 B=256 M=8 throughput M/S 0.5 0.5937, more" in lines


def test_the_published_bound_is_broken_at_0_574_by_one_cap_for_both_stages() -> None:
    """rho = S B / (L W), where F + B is one unit of time, F lasts 1/3 and B 2/3. The
    cap M = 8 is on what a worker holds of both its stages, and F of the early stage
    leaves one place free for the late one, or all would wait for each other."""
    schedule = one_cap(8, 256, 8)
    ran = simulate(schedule)
    assert [w.peak_activations for w in ran.workers] == [8] * 8
    assert round(16 * 256 / (ran.latency / 3) / 8, 3) == 0.574
    assert 1 - ran.bubble_rate == pytest.approx(16 * 256 / (ran.latency / 3) / 8)


def one_cap(p: int, microbatches: int, room: int) -> Schedule:
    """folded in the order that a cap for each worker gives, oldest microbatch first."""
    last, n = 2 * p - 1, schedules.oldest_microbatch_first(2 * p)
    ready: list[list[tuple[int, Job]]] = [[] for _ in range(p)]
    ready[0] = [(n(0, b, FORWARD), Job(0, b, FORWARD)) for b in range(microbatches)]
    full, free, now = [0] * p, [True] * p, 0
    ends: list[tuple[int, int, Job]] = []
    order: dict[Job, int] = {}

    def has_room(job: Job, worker: int) -> bool:
        return job.direction is BACKWARD or full[worker] < room - (job.stage < p)

    while True:
        for worker in range(p):
            can = [e for e in ready[worker] if has_room(e[1], worker)]
            if free[worker] and can:
                entry = min(can, key=lambda e: e[0])
                ready[worker].remove(entry)
                forward = entry[1].direction is FORWARD
                full[worker] += forward
                free[worker] = False
                order[entry[1]] = len(order)
                heappush(ends, (now + (1 if forward else 2), len(order), entry[1]))
        if not ends:
            return replace(
                schedules.folded(p, microbatches),
                n=lambda s, b, d: order[Job(s, b, d)],
                in_flight=None,
                in_order=True,
            )
        now = ends[0][0]
        while ends and ends[0][0] == now:
            s, b, d = heappop(ends)[2]
            free[min(s, last - s)] = True
            full[min(s, last - s)] -= d is BACKWARD
            after = Job(s + 1, b, d) if d is FORWARD else Job(s - 1, b, d)
            if after.stage > last:
                after = Job(s, b, BACKWARD)
            if after.stage >= 0:
                at = min(after.stage, last - after.stage)
                ready[at].append((n(*after), after))
