"""The event loop against published latencies, and what a cap does to 1F1B."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from fxsched import Direction, Job, PlanError
from fxsched.clock.event_loop import run_jobs
from fxsched.clock.jobs import Jobs, job_rows
from fxsched.clock.timeline import Event, Timeline

FORWARD, BACKWARD, WEIGHT, _ = Direction
Cap = Callable[[int], int | None]


def uncapped(stage: int) -> None:
    return None


def chain(
    stages: int,
    microbatches: int,
    workers: int,
    worker: Callable[[int, int], int],
    n: Callable[[Job], int],
) -> Jobs:
    """The jobs of a chain of stages."""
    kinds = [(s, FORWARD) for s in range(stages)]
    kinds += [(s, BACKWARD) for s in reversed(range(stages))]
    preds = [[i - 1] if i else [] for i in range(stages)]
    preds += [[2 * stages - 1 - i, i - 1] for i in range(stages, 2 * stages)]
    preds[stages] = [stages - 1]
    kind, rows = job_rows(kinds, frozenset(), microbatches)
    every = [Job(kinds[k][0], b, kinds[k][1]) for k, b in zip(kind, rows, strict=True)]
    placed = [worker(job.stage, job.microbatch) for job in every]
    return Jobs(
        tuple(kinds),
        tuple(map(tuple, preds)),
        frozenset(),
        microbatches,
        workers,
        kind,
        rows,
        placed,
        placed,
        [n(job) for job in every],
    )


def by_microbatch(stages: int) -> Callable[[Job], int]:
    """parallelsim's oldest_batch_first: the last predecessor's (b, d, s)."""

    def n(job: Job) -> int:
        s, b, d = job
        last = (0, s - 1) if d is FORWARD else (1, s + 1)
        if d is BACKWARD and s == stages - 1:
            last = (0, s)
        return (2 * b + last[0]) * (stages + 2) + last[1] + 1

    return n


def by_stage(stages: int, microbatches: int) -> Callable[[Job], int]:
    """parallelsim's oldest_stage_first: the last predecessor's (s, d, b)."""

    def n(job: Job) -> int:
        s, b, d = job
        last = (s - 1, 0) if d is FORWARD else (s + 1, 1)
        if d is BACKWARD and s == stages - 1:
            last = (s, 0)
        return ((last[0] + 1) * 2 + last[1]) * microbatches + b

    return n


def simulate(
    stages: int,
    microbatches: int,
    worker: Callable[[int, int], int],
    n: Callable[[Job], int],
    cap: Cap = uncapped,
    backward: float = 2.0,
    workers: int = 64,
) -> Timeline:
    """A chain where F lasts 1 and stage s of microbatch b runs on worker(s, b)."""
    jobs = chain(stages, microbatches, workers, worker, n)
    times = [1.0 if d is FORWARD else backward for _, d in jobs.kinds]
    return run_jobs(jobs, times * microbatches, cap)


def latency(events: Timeline) -> float:
    return max(event.end for event in events)


def busy(events: Timeline, workers: int) -> list[float]:
    times = [0.0] * workers
    for event in events:
        times[event.worker] += event.end - event.start
    return times


def peaks(events: Sequence[Event], stages: int) -> list[int]:
    """The most microbatches of each stage between the start of F and the end of B."""
    most = []
    for stage in range(stages):
        changes = [
            (e.start, 1) if e.job.direction is FORWARD else (e.end, -1)
            for e in events
            if e.job.stage == stage
        ]
        held, peak = 0, 0
        for _, change in sorted(changes):
            held += change
            peak = max(peak, held)
        most.append(peak)
    return most


# (stages, microbatches, workers, w, n, latency, busy_time): from parallelsim.py of
# a-rahimi/parallel-training at e05be6f, with F=1 and B=2.
CASES = {
    "ddp": (4, 8, 8, lambda s, b: b, by_microbatch(4), 12, 12),
    "gpipe": (4, 8, 4, lambda s, b: s, by_microbatch(4), 33, 24),
    "gpipe by stage": (4, 8, 4, lambda s, b: s, by_stage(4, 8), 33, 24),
    "lpp": (4, 8, 4, lambda s, b: 2 * b % 4 + s % 2, by_microbatch(4), 28, 24),
    "64 workers": (64, 32, 64, lambda s, b: s, by_microbatch(64), 285, 96),
}


@pytest.mark.parametrize("case", CASES)
def test_latency_and_busy_time_are_those_of_parallelsim(case: str) -> None:
    stages, microbatches, workers, w, n, expected, each = CASES[case]
    events = simulate(stages, microbatches, w, n)
    assert latency(events) == expected
    assert busy(events, workers) == [each] * workers


def test_every_job_starts_after_its_predecessors_ended() -> None:
    events = simulate(4, 8, lambda s, b: 2 * b % 4 + s % 2, by_microbatch(4))
    end = {event.job: event.end for event in events}
    start = {event.job: event.start for event in events}
    jobs = events.jobs
    for number in range(len(jobs)):
        first = number - number % len(jobs.kinds)
        for pred in jobs.preds[number % len(jobs.kinds)]:
            assert end[jobs.job(first + pred)] <= start[jobs.job(number)]


def test_a_worker_runs_one_job_at_a_time() -> None:
    events = simulate(4, 8, lambda s, b: s % 3, by_microbatch(4))
    for worker in range(3):
        mine = [e for e in events if e.worker == worker]
        assert all(a.end <= b.start for a, b in pairwise(mine))


def test_of_the_ready_jobs_the_smallest_n_runs_first() -> None:
    events = simulate(1, 4, lambda s, b: 0, lambda job: -job.microbatch)
    assert " ".join(str(e.job) for e in events) == "0F3 0B3 0F2 0B2 0F1 0B1 0F0 0B0"


def test_equal_n_runs_in_the_order_of_the_jobs_given() -> None:
    events = simulate(1, 3, lambda s, b: 0, lambda job: 0)
    assert " ".join(str(e.job) for e in events) == "0F0 0B0 0F1 0B1 0F2 0B2"


def test_a_cap_of_distance_to_sink_gives_1f1b_its_memory_at_no_cost() -> None:
    free = simulate(8, 64, lambda s, b: s, by_microbatch(8))
    capped = simulate(8, 64, lambda s, b: s, by_microbatch(8), lambda s: 8 - s)
    assert peaks(capped, 8) == [8, 7, 6, 5, 4, 3, 2, 1]
    assert max(peaks(free, 8)) == 22
    assert latency(capped) == latency(free) == 3 * (64 + 8 - 1)


def test_a_cap_holds_on_the_worker_of_b_for_each_stage() -> None:
    events = simulate(2, 8, lambda s, b: b % 2, by_microbatch(2), lambda s: 1)
    for worker in range(2):
        assert peaks([e for e in events if e.worker == worker], 2) == [1, 1]


def test_a_cap_that_stops_all_returns_the_jobs_before() -> None:
    stopped = simulate(2, 2, lambda s, b: s, by_microbatch(2), lambda s: 0)
    assert list(stopped) == [] and not stopped.complete


def test_a_job_prints_as_stage_direction_microbatch_and_parses_back() -> None:
    for job in (Job(12, 3, FORWARD), Job(0, 11, BACKWARD), Job(4, 0, WEIGHT)):
        assert Job.parse(str(job)) == job
    assert str(Job(2, 0, FORWARD)) == "2F0"


def test_what_is_no_job_does_not_parse() -> None:
    with pytest.raises(PlanError, match=r"not a job: write stage, F, B, W or U"):
        Job.parse("2X0")
