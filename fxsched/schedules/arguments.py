"""Checks of what a user gives to a constructor of a schedule."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec

from ..jobs.job import MISUSE, PlanError
from ..jobs.schedule import Schedule
from ..jobs.user_values import positive, shown

P = ParamSpec("P")


def constructor(make: Callable[P, Schedule]) -> Callable[P, Schedule]:
    """Has a function that makes a schedule say what it takes, in the TypeError for
    arguments that are missing, too many or unknown."""
    takes = inspect.signature(make)

    @wraps(make)
    def call(*args: P.args, **kwargs: P.kwargs) -> Schedule:
        try:
            takes.bind(*args, **kwargs)
        except TypeError as error:
            given = [*map(shown, args), *(f"{k}={shown(kwargs[k])}" for k in kwargs)]
            what = str(error)
            names = list(takes.parameters)
            if twice := [name for name in names[: len(args)] if name in kwargs]:
                what = f"{twice[0]} is given twice, by place and by name"
            if unknown := [name for name in kwargs if name not in names]:
                near = difflib.get_close_matches(unknown[0], names, 1)
                hint = f", did you mean {near[0]}=?" if near else ""
                what = f"there is no argument {unknown[0]!r}{hint}"
            wrong = TypeError(
                f"{make.__name__}({', '.join(given)}): {what}; it takes "
                f"{', '.join(map(_argument, takes.parameters.values()))}"
            )
            vars(wrong)[MISUSE] = True
            raise wrong from None
        return make(*args, **kwargs)

    return call


def _argument(parameter: inspect.Parameter) -> str:
    """An argument as a call writes it: its name, and its default."""
    return str(parameter.replace(annotation=parameter.empty))


def one_of(call: str, argument: str, value: object, allowed: Sequence[object]) -> None:
    """Raises PlanError, with the nearest name, for a value that isn't allowed."""
    plain = value is None or isinstance(value, str | int)
    if plain and not isinstance(value, bool) and value in allowed:
        return
    names = [name for name in allowed if isinstance(name, str)]
    near = difflib.get_close_matches(str(value).lower(), names, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise PlanError(f"{call}({argument}={value!r}): give {either(allowed)}{hint}")


def either(allowed: Sequence[object]) -> str:
    """Values as an error lists them: 1, 2 or 4."""
    *first, last = map(repr, allowed)
    return f"{', '.join(first)} or {last}" if first else last


def multiple(call: str, argument: str, count: int, of: int, why: str) -> int:
    """The count; PlanError, with the nearest that fit, if it isn't a multiple."""
    if rest := count % of:
        near = [value for value in (count - rest, count - rest + of) if value]
        raise PlanError(
            f"{call}: give {argument}={either(near)}, or another multiple of {of}, "
            f"{why}"
        )
    return count


def equal_shares(
    name: str,
    workers: int,
    microbatches: int | None,
    why: str = "so that each worker has as many as the others",
) -> int:
    """The microbatches, one for each worker unless given.

    why: they have to be a multiple of the workers, or PlanError is raised.
    """
    positive(name, workers=workers)
    if microbatches is None:
        return workers
    return _multiple_of_workers(name, workers, "microbatches", microbatches, why)


def groups(name: str, workers: int, group_size: int) -> int:
    """How many groups of that size the workers make."""
    positive(name, workers=workers, group_size=group_size)
    if workers % group_size:
        divisors = [size for size in range(1, workers + 1) if not workers % size]
        raise PlanError(
            f"{name}(workers={workers}, group_size={group_size}): give group_size="
            f"{either(divisors)}, a divisor of workers, so that groups are equal"
        )
    return workers // group_size


def loops(name: str, workers: int, stages: int | None) -> int:
    """How many times the stages, two a worker unless given, go round the workers."""
    positive(name, workers=workers)
    if stages is None:
        return 2
    why = "so that each worker runs as many as the others"
    return _multiple_of_workers(name, workers, "stages", stages, why) // workers


def _multiple_of_workers(
    name: str, workers: int, what: str, count: int, why: str
) -> int:
    positive(name, **{what: count})
    call = f"{name}(workers={workers}, {what}={count})"
    return multiple(call, what, count, workers, why)
