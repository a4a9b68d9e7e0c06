"""Pipelines that never drain within a call: weights are some updates old.

A call holds many updates, so that filling and draining are paid once for all of them.
What a job may read is version(s, b, d); all else is that of 1f1b.
"""

from __future__ import annotations

from dataclasses import replace

from ..jobs.job import Direction, PlanError
from ..jobs.schedule import Schedule
from ..jobs.user_values import is_count
from .arguments import positive
from .pipelines import one_f_one_b


def pipedream(workers: int, microbatches: int) -> Schedule:
    """1f1b with an update of a stage after each of its B: update_every 1, and
    version = max(0, b + 1 - (W - s)) for F and B.

    F takes the newest weights of its stage, which is when W - s microbatches are in
    flight, and B the same ones again (weight stashing): stage s keeps W - s versions.
    PipeDream (Narayanan et al. 2019, doi 10.1145/3341301.3359646).
    """
    positive("pipedream", workers=workers, microbatches=microbatches)

    def version(s: int, b: int, d: Direction) -> int:
        return max(0, b + 1 - (workers - s))

    return replace(
        one_f_one_b(workers, microbatches),
        update_every=1,
        version=version,
        name="pipedream",
    )


def pipedream_2bw(
    workers: int, microbatches: int, every: int | None = None
) -> Schedule:
    """1f1b with an update every `every` microbatches, W of them unless given, and
    version = max(0, b // every - 1): W(t + 1) = W(t) - step(gradient at W(t - 1)).

    All stages are one update late, and keep two versions. With `every` of W or more no
    worker waits for an update.
    PipeDream-2BW (Narayanan et al. 2021, arXiv 2006.09503).
    """
    return _one_late("pipedream_2bw", workers, microbatches, every)


def stale_by_one(workers: int, microbatches: int) -> Schedule:
    """pipedream_2bw with the fewest microbatches to an update that keep all workers
    busy, W: between F and B of each microbatch lies one update of the stage, and B
    reads the version before it, the only one that is kept.
    """
    return _one_late("stale_by_one", workers, microbatches, workers)


def _one_late(
    name: str, workers: int, microbatches: int, every: int | None
) -> Schedule:
    positive(name, workers=workers, microbatches=microbatches)
    every = workers if every is None else every
    if not is_count(every) or microbatches % every:
        raise PlanError(
            f"{name}(workers={workers}, microbatches={microbatches}): an update is for "
            f"{every!r} microbatches; give a multiple of that many"
        )
    return replace(
        one_f_one_b(workers, microbatches),
        update_every=every,
        version=lambda s, b, d: max(0, b // every - 1),
        name=name,
    )
