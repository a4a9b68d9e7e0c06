"""Reads schedules from the files that Schedule.save writes."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from ..jobs.job import Direction, Job, Placement, PlanError
from ..jobs.own_caps import OwnCaps
from ..jobs.schedule import SAVED, Schedule
from ..jobs.user_values import is_count

FIELDS = (
    "fxsched_schedule",
    "name",
    "workers",
    "microbatches",
    "stages",
    "split_backward",
    "in_order",
    "in_flight",
    "jobs",
)
UPDATES = ("update_every", "updates", "updaters")  # where there are any
PAIRS = {"rate": "rates", "drift": "drifts"}  # a schedule's fields, and a file's
NEWER = ("versions", "ahead", "average_every", "elastic", "outer", "saved", "cut")
SOME = (*NEWER, *PAIRS.values())


def load_schedule(path: str | PathLike[str]) -> Schedule:
    """Reads a schedule from a file that Schedule.save wrote.

    The schedule has the saved workers, microbatches and stages, and the saved w and n
    of each job. Raises PlanError, which names the file, if the file can't be read,
    isn't JSON, has another version, or is incomplete.
    """
    file = fspath(path)
    try:
        record = json.loads(Path(file).read_text("utf-8"))
    except OSError as error:
        raise PlanError(f"{file} can't be read: {error.strerror}") from error
    except ValueError as error:  # of the encoding too
        raise PlanError(
            f"{file} is not JSON ({error}); give what Schedule.save wrote"
        ) from error
    try:
        return _schedule(record)
    except PlanError as error:
        raise PlanError(
            f"{file} holds no schedule: {error}; give what Schedule.save wrote"
        ) from error


def _schedule(record: Any) -> Schedule:
    if not isinstance(record, dict) or "fxsched_schedule" not in record:
        raise PlanError("it has no 'fxsched_schedule'")
    version = record["fxsched_schedule"]
    if version != SAVED:
        raise PlanError(
            f"it is of version {version!r}, and this fxsched reads {SAVED}; save it "
            "again"
        )
    fields = FIELDS + (UPDATES if set(UPDATES) & record.keys() else ())
    fields += tuple(field for field in SOME if field in record)
    for field in [*fields, *record]:
        if field not in record or field not in fields:
            verb = "has" if field in record else "lacks"
            raise PlanError(f"it {verb} {field!r}; its fields are {', '.join(fields)}")
    caps, jobs = _caps(record["in_flight"]), _jobs(record["jobs"])
    saved = record.get("saved", {})
    if not isinstance(saved, dict) or not saved.keys() <= record["jobs"].keys():
        raise PlanError("its saved must be an object with places for jobs")

    def w(s: int, b: int, d: Direction) -> Placement:
        keeper, worker, _ = jobs[Job(s, b, d)]
        return Placement(keeper, worker, saved.get(f"{s}{d}{b}"))

    loaded = Schedule(
        **{field: record[field] for field in FIELDS[2:7]},
        w=w,
        n=lambda s, b, d: jobs[Job(s, b, d)][2],
        in_flight=OwnCaps(caps.get) if caps else None,
        name=str(record["name"]),
    )
    every = range(loaded.microbatches)
    stages = range(loaded.stages or 0)
    wanted = {Job(s, b, d) for s in stages for b in every for d in loaded.directions}
    if not stages or wanted != jobs.keys():
        odd = sorted(map(str, wanted ^ jobs.keys())) or ["stages"]
        raise PlanError(f"its jobs aren't those of {loaded} and its stages: {odd[0]}")
    for job in jobs:
        loaded.place(job)
    loaded = _with_updates(loaded, record)
    if "cut" in record:
        loaded = replace(loaded, cut=_cut(record["cut"], loaded.stages or 0))
    if "ahead" in record:  # null: no bound
        bound = record["ahead"]
        loaded = replace(loaded, ahead=inf if bound is None else bound)
    return loaded


def _with_updates(schedule: Schedule, record: dict[str, Any]) -> Schedule:
    """The schedule with the record's updates; where it has none, n of an update is that
    of the job before it."""
    updates, release = _numbers("updates", record.get("updates", {})), schedule.release
    updaters = record.get("updaters")

    def n(s: int, b: int, d: Direction) -> int:
        job = Job(s, b, d)
        if d is not Direction.UPDATE:
            return schedule.n(*job)
        return updates[job] if job in updates else schedule.n(s, b, release)

    if updaters is None:
        if "average_every" in record:
            raise PlanError("it has 'average_every' without updates")
        return replace(schedule, n=n)
    stages = range(schedule.stages or 0)
    if not isinstance(updaters, list) or len(updaters) != len(stages):
        raise PlanError("its updaters must be a list of a worker, or null, by stage")
    u = None if None in updaters else lambda s, b: updaters[s]
    loaded = replace(
        schedule,
        n=n,
        u=u,
        update_every=record["update_every"],
        average_every=record.get("average_every"),
        elastic=record.get("elastic"),
        outer=record.get("outer"),
    )
    ends = loaded.updated(loaded.update_every or loaded.microbatches)
    if updates.keys() != {Job(s, b, Direction.UPDATE) for s in stages for b in ends}:
        raise PlanError(f"its updates aren't those of {loaded} and its stages")
    for stage in stages:
        loaded.updater(stage)
    if "versions" in record:
        loaded = _with_versions(loaded, record["versions"])
    return _with_pairs(loaded, record)


def _with_pairs(schedule: Schedule, record: dict[str, Any]) -> Schedule:
    """The schedule with what its stages do to learning rates, and to weights of B."""
    pairs: dict[str, Any] = {}
    for field, name in PAIRS.items():
        if name not in record:
            continue
        stages = record[name]
        if not isinstance(stages, list) or len(stages) != schedule.stages:
            raise PlanError(f"its {name} must be a list of a pair, or null, by stage")
        answers = [tuple(each) if isinstance(each, list) else each for each in stages]
        pairs[field] = answers.__getitem__
    loaded = replace(schedule, **pairs)
    for stage in range(schedule.stages or 0):
        loaded.stage_rate(stage)
        loaded.stage_drift(stage)
    return loaded


def _with_versions(schedule: Schedule, record: object) -> Schedule:
    """The schedule with what its jobs' weights have seen."""
    versions = _numbers("versions", record)
    loaded = replace(schedule, version=lambda s, b, d: versions[Job(s, b, d)])
    every, stages = range(schedule.microbatches), range(schedule.stages or 0)
    for job in (Job(s, b, d) for s in stages for b in every for d in loaded.directions):
        loaded.seen(job)
    return loaded


def _cut(record: object, stages: int) -> dict[str, int]:
    """The stages of a model's operations."""
    if not isinstance(record, dict) or not set(record.values()) <= {*range(stages)}:
        raise PlanError("its cut must be an object, with a stage for each operation")
    return record


def _caps(record: object) -> dict[int, int]:
    """in_flight by stage, where there is any."""
    if not isinstance(record, list) or not all(
        c is None or is_count(c) for c in record
    ):
        raise PlanError("its in_flight must be a list of ints of 1 or more, or null")
    return {stage: cap for stage, cap in enumerate(record) if cap is not None}


def _numbers(field: str, record: object) -> dict[Job, int]:
    """A number for each of some jobs."""
    if not isinstance(record, dict) or set(map(type, record.values())) - {int}:
        raise PlanError(f"its {field} must be an object, with an int for each job")
    return {Job.parse(name): n for name, n in record.items()}


def _jobs(record: object) -> dict[Job, list[int]]:
    """What w and n say of each job."""
    if not isinstance(record, dict):
        raise PlanError("its jobs must be an object, with 2F0 and the like as keys")
    for name, row in record.items():
        if not isinstance(row, list) or list(map(type, row)) != [int] * 3:
            raise PlanError(
                f"its job {name} has {row!r}; give three ints: the worker that keeps "
                "its weights, the one that runs it, and n"
            )
    return {Job.parse(name): row for name, row in record.items()}
