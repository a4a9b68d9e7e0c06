"""Says which schedule to train a model with, and what that gains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..draw.palette import clock
from ..draw.tables import byte_text, columns, wrapped
from ..dry_run import Planner
from ..jobs.job import PlanError
from ..jobs.schedule import Schedule
from ..jobs.user_values import counted, positive
from ..plans.plan import Plan
from ..progress import Progress
from ..schedules.auto import auto
from ..schedules.data_parallel import ddp

MICROBATCHES = (1, 2, 4)  # that are tried, for each worker
SIMPLER = 0.03  # of a step: what one process, or ddp, may take longer


class Choice(NamedTuple):
    """A plan, and how to write its schedule."""

    code: str
    plan: Plan

    @property
    def seconds(self) -> float:
        """Of its predicted step."""
        return self.plan.simulate().latency

    @property
    def bytes(self) -> float:
        """Of the worker that holds the most."""
        return max(peaks.at_once.total for peaks in self.plan.memory)

    def __str__(self) -> str:
        seconds = clock(self.seconds, "s").text(self.seconds)
        return f"{self.code}: {seconds} a step, {byte_text(self.bytes)} on a worker"


class Recommendation(NamedTuple):
    """best: what to take. others: what was compared with it, shortest step first.
    refused: what can't be planned, and why.

    plan and schedule are those of the best; str() is for people.
    """

    best: Choice
    others: tuple[Choice, ...]
    refused: tuple[str, ...]

    @property
    def plan(self) -> Plan:
        """The plan of the best."""
        return self.best.plan

    @property
    def schedule(self) -> Schedule:
        """The schedule of the best, with the cut of its plan if it is auto's."""
        return self.best.plan.schedule

    def __str__(self) -> str:
        """What to take, what it gains, what limits it, and the code to paste."""
        best, width = self.best, columns(100)
        text = [f"take {best}"]
        if any(other.seconds < best.seconds for other in self.others):
            text[0] += (
                f", the simplest within {100 * SIMPLER:.0f} % of the shortest step"
            )
        for other in self.others:
            longer = other.seconds / best.seconds
            text.append(f"  {other}, {longer:.2f} times as long")
        text += [f"  {why}" for why in self.refused]
        limits = best.plan.explain().rsplit("\n\n", 1)[-1]
        if best.plan.schedule.workers == 1:
            code = "train without fxsched: no schedule is faster than one process"
        else:
            code = (
                f"schedule = fxsched.schedules.{best.code}\n"
                "model = torch.compile(model, backend=fxsched.backend(schedule))"
            )
        return "\n\n".join((wrapped(text, width), limits, code))


def recommend(
    model: Callable[..., Any], workers: int, *args: Any, **kwargs: Any
) -> Recommendation:
    """Recommends a schedule for model(*args, **kwargs) on so many workers.

    Plans one process, ddp, and schedules.auto with one, two and four microbatches for
    each worker, as far as these divide the batch, and compares the predicted steps. Of
    steps that differ by 3 % or less it takes one process first, then ddp. A number of
    `workers` is that of processes with a device, or a CPU core, each.

    kwargs: may have options of fxsched.plan, such as memory_limit, network or
        optimizer, and `microbatches`, a number of them, in the place of those above.
    Raises PlanError for a model that can't be planned, or not within memory_limit.
    """
    positive("recommend", workers=workers)
    counts = _counts(workers, kwargs.pop("microbatches", None), args, kwargs)
    asked = {"Schedule(1, 1)": Schedule(1, 1, name="one process")}
    if workers > 1:
        asked[f"ddp(workers={workers})"] = ddp(workers)
        for count in counts:
            code = f"auto(workers={workers}, microbatches={count})"
            asked[code] = auto(workers, count)
    planner = Planner(model, *args, **kwargs)
    made, refused = list[Choice](), list[tuple[str, PlanError]]()
    with Progress("recommend") as progress:
        for number, (code, schedule) in enumerate(asked.items(), 1):
            progress.at(f"planning {schedule}", number, len(asked))
            name = "one process" if schedule.workers == 1 else code
            try:
                made.append(Choice(name, planner.plan(schedule)))
            except PlanError as error:
                refused.append((name, error))
    if not made:
        raise refused[-1][1]
    least = min(choice.seconds for choice in made)
    best = next(each for each in made if each.seconds <= least * (1 + SIMPLER))
    if best is not made[0] and best.plan.schedule.name != "ddp":
        best = min(made, key=lambda each: each.seconds)
    others = sorted((c for c in made if c is not best), key=lambda each: each.seconds)
    said = tuple(f"{name}: {str(why).splitlines()[0]}" for name, why in refused)
    return Recommendation(best, tuple(others), said)


def _counts(
    workers: int, given: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[int]:
    """The numbers of microbatches to try."""
    if given is not None:
        positive("recommend", microbatches=given)
        return [given]
    tensors = (a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
    rows = next((t.shape[0] for t in tensors if t.dim() > 0), 4 * workers)
    counts = [each * workers for each in MICROBATCHES if rows % (each * workers) == 0]
    if not counts:
        raise PlanError(
            f"recommend(workers={workers}): {workers} workers can't share the batch's "
            f"{counted(rows, 'row')} equally; give microbatches=, or a batch of a "
            f"multiple of {workers}"
        )
    return counts
