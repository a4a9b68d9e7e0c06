"""How long jobs take in a simulation: what a user may give, and what that comes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from types import MappingProxyType

import networkx as nx

from ..clock import stage_graph
from ..clock.jobs import Jobs, Kind
from ..clock.stage_graph import kind_seconds
from ..clock.timeline import Event
from ..jobs.job import ALL_ROWS, Direction, Job, PlanError
from ..jobs.schedule import Schedule
from ..jobs.user_values import is_number, raised

FORWARD = Direction.FORWARD
Durations = Mapping[str, float] | Callable[[Job], float] | Sequence[Event] | None
UNITS = MappingProxyType({"F": 1.0, "B": 2.0})


def set_durations(
    stages: nx.DiGraph[int],
    schedule: Schedule,
    durations: Durations,
    kinds: frozenset[Kind] | None = None,
) -> None:
    """Writes the times of a microbatch's jobs to the stages.

    kinds: of the jobs that there are, if that is known: a stage may have no W, or no B.
    Raises PlanError for durations that aren't as `simulate` has them.
    """
    if durations is None:
        _check_stages(stages)
    elif isinstance(durations, Mapping):
        _set_constants(stages, durations)
    elif callable(durations):
        _set_times(stages, schedule, _checked(durations), kinds)
    else:
        _set_times(stages, schedule, _medians(durations, schedule), kinds)


def job_seconds(
    stages: nx.DiGraph[int], jobs: Jobs, durations: Durations
) -> list[float]:
    """How long each job takes, by number, where the stages' durations are set."""
    if callable(durations):
        checked = _checked(durations)
        return [checked(jobs.job(number)) for number in range(len(jobs))]
    seconds = kind_seconds(stages, jobs.kinds)
    for (s, d), time in zip(jobs.kinds, seconds, strict=True):
        if not is_number(time):
            raise _no_time(Job(s, 0, d), time)
    return stage_graph.job_seconds(stages, jobs)


def _check_stages(stages: nx.DiGraph[int]) -> None:
    for s, data in stages.nodes(data=True):
        if "forward" not in data or "backward" not in data:
            raise PlanError(
                f"simulate(durations=None): stage {s} has no `forward` and "
                "`backward`; give them to its node, or give durations"
            )


def _set_constants(stages: nx.DiGraph[int], durations: Mapping[str, float]) -> None:
    if not {"F", "B"} <= set(durations) <= {"F", "B", "W", "U"}:
        raise PlanError(
            f"simulate(durations={dict(durations)}): give times of F, B and, if B is "
            'split, W, and of U, if there is an update, as {"F": 1, "B": 2}'
        )
    for name, time in durations.items():
        if not is_number(time):
            raise PlanError(
                f"simulate(durations={dict(durations)}): {name} takes {time!r}; give a "
                "number, 0 or more"
            )
    for _, data in stages.nodes(data=True):
        data.pop("weight", None)
        data["forward"], data["backward"] = durations["F"], durations["B"]
        data["update"] = durations.get("U", 0.0)
        if "W" in durations:
            data["backward"] += durations["W"]
            data["weight"] = durations["W"]


def _set_times(
    stages: nx.DiGraph[int],
    schedule: Schedule,
    times: Callable[[Job], float],
    kinds: frozenset[Kind] | None,
) -> None:
    for s, data in stages.nodes(data=True):
        every = [ALL_ROWS] if data.get("joint") else range(schedule.microbatches)
        for b in every:  # the first whose B takes time
            data["forward"] = times(Job(s, b, FORWARD))
            later = [
                times(Job(s, b, d)) if kinds is None or (s, d) in kinds else 0.0
                for d in schedule.directions[1:]
            ]
            data["backward"], data["weight"] = sum(later), later[-1]
            if data["backward"] != 0:
                break
        if schedule.update_every is not None:
            last = schedule.update_every - 1
            data["update"] = times(Job(s, last, Direction.UPDATE))


def _medians(events: Sequence[Event], schedule: Schedule) -> Callable[[Job], float]:
    """How long a job of a stage and direction took, of all that ran."""
    taken: dict[tuple[int, Direction], list[float]] = {}
    if not isinstance(events, Sequence) or isinstance(events, str):
        raise _no_durations(events)
    for event in events:
        if not isinstance(event, Event):
            raise _no_durations(events)
        job, _, start, end = event
        taken.setdefault((job.stage, job.direction), []).append(end - start)
    times = {kind: median(seconds) for kind, seconds in taken.items()}
    ran = {d for _, d in times}
    if missing := set(schedule.directions) - ran:
        names = " and ".join(sorted(map(str, missing)))
        raise PlanError(
            f"durations: the timeline has no {names} jobs, which {schedule} has; give "
            "one of a whole step of it, backward() included"
        )

    def time(job: Job) -> float:
        if (job.stage, FORWARD) not in times:
            raise PlanError(
                f"durations: the timeline has no jobs of stage {job.stage}; give one "
                "of as many stages"
            )
        return times.get((job.stage, job.direction), 0.0)

    return time


def _checked(durations: Callable[[Job], float]) -> Callable[[Job], float]:
    """The user's function, with errors that name the job."""

    def time(job: Job) -> float:
        try:
            seconds = durations(job)
        except Exception as error:
            raise raised(f"durations({job})", error, "a Job") from error
        if not is_number(seconds):
            raise _no_time(job, seconds)
        return seconds

    return time


def _no_durations(value: object) -> PlanError:
    return PlanError(
        f"simulate(durations={value!r}): give times of F and B, as "
        '{"F": 1, "B": 2}; a function of the job; a timeline, such as '
        "backend.timeline; or None for the times of the stages"
    )


def _no_time(job: Job, time: object) -> PlanError:
    return PlanError(f"durations: {job} takes {time!r}; give a number, 0 or more")
