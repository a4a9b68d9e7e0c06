"""Pipelines that stay full during a call: jobs read weights that are some updates old.

A call has many updates, so that the pipeline fills and drains once for all of them.
version(s, b, d) says which weights a job reads. All other settings are those of 1f1b.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from ..jobs.job import Direction, PlanError
from ..jobs.schedule import Schedule
from ..jobs.user_values import is_count, is_number, positive
from .arguments import constructor, multiple
from .pipelines import one_f_one_b


@constructor
def pipedream(workers: int, microbatches: int) -> Schedule:
    """1f1b with an update of a stage after each of its B.

    update_every = 1, and version = max(0, b + 1 - (W - s)) for F and B.

    F reads the newest weights of its stage, while W - s microbatches are in flight. B
    reads the same weights again (weight stashing), so that stage s keeps W - s
    versions. PipeDream (Narayanan et al. 2019, doi 10.1145/3341301.3359646).
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


@constructor
def pipedream_2bw(
    workers: int, microbatches: int, every: int | None = None
) -> Schedule:
    """1f1b with an update every `every` microbatches, by default every W.

    version = max(0, b // every - 1): W(t + 1) = W(t) - step(gradient at W(t - 1)).

    All stages read weights that are one update old, and keep two versions. If `every`
    is W or more, no worker waits for an update. PipeDream-2BW (Narayanan et al. 2021,
    arXiv 2006.09503).
    """
    return _one_late("pipedream_2bw", workers, microbatches, every)


@constructor
def stale_by_one(workers: int, microbatches: int) -> Schedule:
    """pipedream_2bw with W microbatches to an update.

    W is the smallest number that keeps all workers busy. Between F and B of each
    microbatch there is one update of the stage. B reads the version before that update,
    the only older version that is kept.
    """
    return _one_late("stale_by_one", workers, microbatches, None)


@constructor
def pipemare(
    workers: int,
    microbatches: int,
    annealed: int = 1000,
    correction: float | None = 0.135,
    every: int = 1,
) -> Schedule:
    """1f1b in which F and B each read the newest weights when they run.

    No older versions are kept: version = max(0, (b + 1 - (W - s)) // every) for F and b
    // every for B. So F of stage s reads weights that are tau = (W - 1 - s) / every
    updates older than the weights that B reads.

    The paper has three techniques against this difference:
    T1, rescheduled learning rates: at update k of a stage its learning rates are
    divided by max(tau, 1) ** (1 - min(k / annealed, 1)).
    T2, discrepancy correction: B reads an estimate of the weights that F read: the
    weights minus tau times their velocity. The velocity is a running average of how
    updates change a weight, and decays by correction ** (1 / tau) an update.
    T3, warm-up, is left to you: first train some epochs by a synchronous schedule, 1f1b
    on as many workers, with the same model and optimizer.

    annealed: the number of updates until learning rates are no longer divided; the
        paper's K.
    correction: the paper's D, about e^-2; None for no correction.
    every: the number of microbatches to an update.
    Velocities and numbers of updates start at 0, and are in the optimizer's state. In
    the paper a stage runs an F and a B at the same time, so that tau is (2 (W - 1 - s)
    + 1) / every. 1f1b runs one F and one B in turns, which gives the tau above.
    PipeMare (Yang et al. 2021, arXiv 1910.05124).
    """
    positive("pipemare", workers=workers)
    _updates("pipemare", workers, microbatches, every)
    if not is_count(annealed, inf):
        raise PlanError(
            f"pipemare(annealed={annealed!r}): give an int of 1 or more, a number of "
            "updates"
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
    positive(name, workers=workers)
    every = _updates(name, workers, microbatches, every)
    return replace(
        one_f_one_b(workers, microbatches),
        update_every=every,
        version=lambda s, b, d: max(0, b // every - 1),
        name=name,
    )


def _updates(name: str, workers: int, microbatches: int, every: int | None) -> int:
    """How many microbatches each update has, one for each worker unless given."""
    given = {"workers": workers} if every is None else {"every": every}
    positive(name, microbatches=microbatches, **given)
    ((argument, each),) = given.items()
    call = f"{name}({argument}={each}, microbatches={microbatches})"
    multiple(call, "microbatches", microbatches, each, "so that updates have as many")
    return each
