"""Schedules of the library from options, which follow from their constructors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NoReturn

import click

from ..jobs.job import PlanError
from ..jobs.schedule import Schedule
from ..schedules import LIBRARY, STALE, replicate, sharded
from .option_types import COUNT, NUMBER, Decorator, all_of, schedule

WORKERS = 4  # where --workers isn't given
COUNTS = {
    "workers": f"how many workers  [default: {WORKERS}]",
    "microbatches": "how many microbatches, the equal parts of a batch  [default: the "
    "schedule's own number, or twice the workers]",
    "stages": "how many stages  [default: the schedule's own number]",
}
LARGEST = 5_000_000  # stages times microbatches
# What arguments of some schedules mean.
MEANINGS = {
    "group_size": "how many workers each group has",
    "servers": "how many workers are servers, which keep weights and run no jobs",
    "asynchronous": "whether each microbatch is an update of its own",
    "staleness": "by how many updates a worker may be ahead of the slowest one",
    "ahead": "how many more microbatches stage s may have in flight than stage s + 1",
    "held": "how many activations of a stage a worker has room for",
    "even": "whether the stages are dealt out evenly to the workers that keep them",
    "every": "how many microbatches an update has; for local_sgd: after how many "
    "updates replicas are averaged",
    "elastic": "alpha of elastic averaging",
    "outer": "lr and momentum of the outer optimizer of DiLoCo",
    "annealed": "after how many updates learning rates reach their full value",
    "correction": "D of the discrepancy correction, between 0 and 1",
}
# How a constructor's argument is read, by its annotation.
KINDS: dict[object, click.ParamType[Any]] = {
    bool: click.BOOL,
    int: click.INT,
    int | None: click.INT,
    float: NUMBER,
    float | None: NUMBER,
    tuple[float, float] | None: click.Tuple([NUMBER, NUMBER]),
}
REPLICATE = (
    "run G copies of the schedule, data-parallel; each copy has its own workers and "
    "microbatches; --workers and --microbatches are the numbers of one copy"
)
UPDATE_EVERY = (
    "put a step of the optimizer into the program after every K microbatches (of each "
    "copy)  [default: the schedule's own number, or none]"
)
SHARDS = "split each stage into P shards, tensor-parallel, each on a worker of its own"
ZERO = (
    "with --replicate: split the optimizer's state over the copies, as the schedules "
    "zero1 and zero2 do"
)
# what every schedule of the library can be given
EVERY = ("stages", "update_every", "shards", "replicate", "zero")

SCHEDULE = (
    f"one of {', '.join(LIBRARY)}; or a file name.json that search --save wrote; or "
    "path/to/schedule.py:make, a function that returns a Schedule"
)
schedule_option = click.option(
    "--schedule", type=schedule, metavar="NAME", required=True, help=SCHEDULE
)
searched_schedule_option = click.option(
    "--schedule",
    type=schedule,
    metavar="NAME",
    help=f"{SCHEDULE}  [default: what recommend recommends]",
)


def flag(argument: str) -> str:
    """A constructor's argument as it is written on the command line."""
    return f"--{argument.replace('_', '-')}"


@cache
def constructor_parameters(name: str) -> dict[str, inspect.Parameter]:
    """The arguments of a schedule's constructor that a command line can give."""
    takes = inspect.signature(LIBRARY[name], eval_str=True).parameters
    return {
        k: p for k, p in takes.items() if p.annotation in KINDS or p.default is p.empty
    }


def schedule_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds an option for each argument that some schedule of the library takes."""
    takers: dict[str, dict[str, inspect.Parameter]] = {}
    for name in LIBRARY:
        for argument, parameter in constructor_parameters(name).items():
            takers.setdefault(argument, {})[name] = parameter
    takers.setdefault("stages", {})
    stages = click.Choice(("1", "2"))
    return all_of(
        *(_option(argument, by_schedule) for argument, by_schedule in takers.items()),
        click.option("--update-every", type=COUNT, metavar="K", help=UPDATE_EVERY),
        click.option("--shards", type=COUNT, metavar="P", help=SHARDS),
        click.option("--replicate", type=COUNT, metavar="G", help=REPLICATE),
        click.option("--zero", type=stages, callback=_int, help=ZERO),
    )(command)


def _int(ctx: click.Context, option: click.Parameter, value: str | None) -> int | None:
    return None if value is None else int(value)


def _option(argument: str, takers: Mapping[str, inspect.Parameter]) -> Decorator:
    if argument in COUNTS:
        return click.option(flag(argument), type=COUNT, help=COUNTS[argument])
    text = f"for {', '.join(map(_default, takers, takers.values()))}"
    if argument in MEANINGS:
        text = f"{MEANINGS[argument]}; {text}"
    kind = next(KINDS[p.annotation] for p in takers.values() if p.annotation in KINDS)
    if kind is click.BOOL:
        names = f"{flag(argument)}/--no-{flag(argument).removeprefix('--')}"
        return click.option(names, default=None, help=text)
    return click.option(flag(argument), type=kind, help=text)


def _default(name: str, parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return f"{name} (required)"
    if parameter.default is None or isinstance(parameter.default, bool):
        return name
    return f"{name} (default: {parameter.default})"


def passed_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given and are arguments of some schedule."""
    known = {*EVERY, *(k for name in LIBRARY for k in constructor_parameters(name))}
    return {k: v for k, v in options.items() if k in known and v is not None}


def usual(options: Mapping[str, Any]) -> dict[str, int]:
    """What a schedule gets for what it needs, where it isn't given."""
    workers = options.get("workers", WORKERS)
    return {"workers": workers, "microbatches": 2 * workers}


def build(name: str | Schedule, options: Mapping[str, Any]) -> Schedule:
    """A schedule of the library by what was given; or one of a file, which takes none
    but shards, and stages if it has none.

    `stages`, which every Schedule has, sets that of one whose constructor doesn't take
    it. Raises PlanError for an option that the schedule doesn't take, or needs.
    """
    if isinstance(name, Schedule):
        if name.stages is None and "stages" in options:
            return build(
                replace(name, stages=options["stages"]),
                {k: v for k, v in options.items() if k != "stages"},
            )
        if others := options.keys() - {"shards"}:
            raise PlanError(
                "--schedule is from a file, which says all but --shards; leave out "
                f"{flag(min(others))}, or change it in the file"
            )
        return _in_shards(name, options)
    takes = constructor_parameters(name)
    for argument in options:
        if argument not in takes and argument not in EVERY:
            _refuse(name, f"doesn't take {flag(argument)}")
    needed = [k for k, p in takes.items() if p.default is p.empty]
    values = {k: v for k, v in usual(options).items() if k in needed} | dict(options)
    missing = [flag(k) for k in needed if k not in values]
    if missing:
        _refuse(name, f"needs {' and '.join(missing)}")
    check_work(values)
    schedule = LIBRARY[name](**{k: v for k, v in values.items() if k in takes})
    if "stages" in options and "stages" not in takes:
        if schedule.stages not in (None, options["stages"]):
            makes = f"makes {schedule.stages} stages for these workers"
            raise Unsuited(f"{name} {makes}; leave out --stages", makes)
        schedule = replace(schedule, stages=options["stages"])
    if "update_every" in options:
        schedule = _updating(schedule, options["update_every"], name)
    schedule = _in_shards(schedule, options)
    copies, zero = options.get("replicate", 1), options.get("zero")
    if zero is not None and copies == 1:
        _refuse(name, "has no copies that could share; --zero needs --replicate")
    return schedule if copies == 1 else replicate(schedule, copies, zero)


def _in_shards(schedule: Schedule, options: Mapping[str, Any]) -> Schedule:
    return sharded(schedule, options["shards"]) if "shards" in options else schedule


def _updating(schedule: Schedule, every: int, name: str) -> Schedule:
    """The schedule with updates that often."""
    if schedule.update_every not in (None, every):
        _refuse(name, f"has an update every {schedule.update_every} microbatches")
    if schedule.microbatches % every:
        _refuse(
            name,
            f"has {schedule.microbatches} microbatches, not a multiple of "
            f"--update-every {every}",
        )
    return replace(schedule, update_every=every)


def build_any(name: str | Schedule, options: Mapping[str, Any]) -> Schedule:
    """The same without the options that this schedule doesn't take: they are for
    others. `stages` sets that of a schedule that leaves it open. One of a file must be
    as large as the others."""
    if isinstance(name, Schedule):
        for size in ("workers", "microbatches"):
            own, others = getattr(name, size), options[size]
            if own != others:
                raise PlanError(
                    f"it has {own} {size}, others {others}; give {flag(size)} {own}"
                )
        return replace(name, stages=name.stages or options.get("stages"))
    takes = {*constructor_parameters(name), "shards", "replicate", "zero"}
    if name not in STALE:  # those say themselves when they update
        takes.add("update_every")
    schedule = build(name, {k: v for k, v in options.items() if k in takes})
    if schedule.stages is None:
        schedule = replace(schedule, stages=options.get("stages"))
    return schedule


def check_work(values: Mapping[str, Any]) -> None:
    """Raises PlanError for more work than a machine is there for."""
    stages = max(values.get("stages", 1), values.get("workers", 1))
    copies = values.get("microbatches", 1) * values.get("replicate", 1)
    copies *= values.get("shards", 1)
    if stages * copies > LARGEST:
        raise PlanError(
            f"{stages} stages (or workers) of {copies} microbatches are too many; give "
            f"numbers with a product of at most {LARGEST:,}"
        )


def _refuse(name: str, what: str) -> NoReturn:
    takes = ", ".join(
        map(flag, {**constructor_parameters(name), **dict.fromkeys(EVERY)})
    )
    raise Unsuited(f"{name} {what}; it takes {takes}", what)


class Unsuited(PlanError):
    """Options that a schedule of the library can't be built with; what: the reason, in
    words that go for other schedules too."""

    def __init__(self, text: str, what: str) -> None:
        super().__init__(text)
        self.what = what


class Refused(dict[str, list[str]]):
    """Names of schedules that can't be compared, by the reason."""

    def add(self, name: str, error: PlanError) -> None:
        """Takes a schedule's error."""
        reason = error.what if isinstance(error, Unsuited) else str(error)
        self.setdefault(" ".join(reason.split()), []).append(name)

    def lines(self) -> list[str]:
        """A line for each reason."""
        return [f"not {', '.join(names)}: {why}" for why, names in self.items()]
