"""Orders of jobs: functions n that several schedules share."""

from __future__ import annotations

from ..jobs.answers import Priority
from ..jobs.job import Direction

FORWARD = Direction.FORWARD


def oldest_microbatch_first(stages: int) -> Priority:
    """Smaller microbatches first; within a microbatch, in the order of data flow.

    `oldest_batch_first` of parallelsim (github.com/a-rahimi/parallel-training).
    """

    def n(s: int, b: int, d: Direction) -> int:
        return 2 * stages * b + (s if d is FORWARD else 2 * stages - 1 - s)

    return n


def oldest_stage_first(stages: int, microbatches: int) -> Priority:
    """Orders jobs by the job that makes them ready.

    Smaller stages of that job go first, then F before B, then smaller microbatches. The
    first F counts as made ready by stage -1.

    `oldest_stage_first` of parallelsim (github.com/a-rahimi/parallel-training).
    """

    def n(s: int, b: int, d: Direction) -> int:
        if d is FORWARD:
            stage, backward = s - 1, 0
        elif s == stages - 1:
            stage, backward = s, 0
        else:
            stage, backward = s + 1, 1
        return (2 * (stage + 1) + backward) * microbatches + b

    return n


def forward_first(microbatches: int) -> Priority:
    """All F before any B; within a direction, smaller microbatches first."""

    def n(s: int, b: int, d: Direction) -> int:
        return b if d is FORWARD else microbatches + b

    return n


def microbatch_first(s: int, b: int, d: Direction) -> int:
    """Smaller microbatches first, for workers that run whole microbatches.

    Of one microbatch, only the jobs that data flow allows are ready. This n doesn't
    need the number of stages.
    """
    return b


def stage_first(s: int, b: int, d: Direction) -> int:
    """All F, stage by stage, then all B, from the last stage to the first.

    A worker reads the weights of each stage twice, however many microbatches it runs.
    This n doesn't need the number of stages.
    """
    return s if d is FORWARD else (1 << 40) - s
