"""Pipelines that never drain within a call: weights are some updates old.

A call holds many updates, so that filling and draining are paid once for all of them.
What a job may read is version(s, b, d); all else is that of 1f1b.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from ..jobs.job import Direction, PlanError
from ..jobs.schedule import Schedule
from ..jobs.user_values import is_count, is_number
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


def pipemare(
    workers: int,
    microbatches: int,
    annealed: int = 1000,
    correction: float | None = 0.135,
    every: int = 1,
) -> Schedule:
    """1f1b in which F and B each read the newest weights that there are when it runs,
    and nothing is stashed: version = max(0, (b + 1 - (W - s)) // every) for F and
    b // every for B. F of stage s is tau = (W - 1 - s) / every updates older than B.

    T1, rescheduled rates: update k of a stage takes its learning rates divided by
    max(tau, 1) ** (1 - min(k / annealed, 1)).
    T2, corrected discrepancy: B reads weights less tau times their velocity, which
    decays by correction ** (1 / tau); None corrects nothing.
    T3 is the user's: some epochs by a synchronous schedule first, 1f1b on as many
    workers, with the same model and optimizer.

    annealed: updates until learning rates are whole; the paper's K.
    correction: the paper's D, about e^-2. every: microbatches to an update.
    Velocities and counts of updates are in the optimizer's state, and start at 0. The
    paper's stages take an F and a B at a time, so that its tau is
    (2 (W - 1 - s) + 1) / every; that of 1f1b, which alternates them, is above.
    PipeMare (Yang et al. 2021, arXiv 1910.05124).
    """
    positive("pipemare", workers=workers, microbatches=microbatches)
    if not is_count(annealed, inf):
        raise PlanError(
            f"pipemare(annealed={annealed!r}): give a number of updates, 1 or more"
        )
    if not is_count(every) or microbatches % every:
        raise PlanError(
            f"pipemare(microbatches={microbatches}, every={every!r}): give an every "
            "that divides the microbatches"
        )
    if correction is not None and not (is_number(correction) and 0 < correction < 1):
        raise PlanError(
            f"pipemare(correction={correction!r}): give a number between 0 and 1, or "
            "None"
        )

    def tau(s: int) -> float:
        return max(workers - 1 - s, 0) / every

    def version(s: int, b: int, d: Direction) -> int:
        if d is Direction.FORWARD:
            return max(0, (b + 1 - (workers - s)) // every)
        return b // every

    def drift(s: int) -> tuple[float, float] | None:
        if correction is None or not tau(s):
            return None
        return tau(s), correction ** (1 / tau(s))

    return replace(
        one_f_one_b(workers, microbatches),
        update_every=every,
        version=version,
        rate=lambda s: (max(tau(s), 1.0), annealed),
        drift=drift,
        name="pipemare",
    )


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
