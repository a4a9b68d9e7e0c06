"""How options are read where click has no type for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from math import isfinite
from pathlib import Path
from typing import Any

import click

from ..jobs.job import PlanError
from ..jobs.schedule import Schedule
from ..schedules import LIBRARY
from ..schedules.saved import load_schedule
from .user_code import returned


class _Int(click.IntRange):
    name = "integer"


class _Number(click.FloatRange):
    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not isfinite(number):
            self.fail(f"{value} is not finite", param, ctx)
        return number


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
COUNT, POSITION = _Int(1), _Int(0)
NUMBER, RATE = _Number(0), _Number(0, min_open=True)


def all_of(*options: Decorator) -> Decorator:
    """Several decorators as one; help shows their options in this order."""
    return lambda command: reduce(lambda c, add: add(c), reversed(options), command)


def schedule(text: str | Schedule) -> str | Schedule:
    """A name of the library, as LIBRARY lists it; or what a .json file holds; or what a
    function in the user's file returns."""
    if isinstance(text, Schedule):
        return text
    if text.endswith(".py"):
        raise PlanError(
            f"{text!r}: give path/to/schedule.py:make, a function of the file"
        )
    if ":" in text:
        return _of_function(text)
    return load_schedule(text) if text.endswith(".json") else LIBRARY.name(text)


def _of_function(text: str) -> Schedule:
    result, name, _ = returned(text)
    if not isinstance(result, Schedule):
        kind = type(result).__name__
        raise PlanError(f"{text}: {name}() returned {kind}; return a fxsched.Schedule")
    return result


def schedules(text: str) -> dict[str, str | Schedule]:
    """What --schedule takes with commas between, by how it is called."""
    found: dict[str, str | Schedule] = {}
    for part in dict.fromkeys(map(str.strip, text.split(",") if text else ())):
        made = schedule(part)
        name = made if isinstance(made, str) else made.name or part
        found[part if name in found else name] = made
    return found


def file(text: str) -> Path:
    """Where to write, refused before there is anything to write."""
    path = Path(text)
    if path.is_dir():
        raise click.BadParameter(f"{text!r} is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise click.BadParameter(
            f"there is no folder {str(path.parent)!r}; make it, or give another path"
        )
    return path


def file_of(*endings: str) -> Callable[[str], Path]:
    """The same with one of these endings, such as .svg."""

    def checked(text: str) -> Path:
        path = file(text)
        device = path.exists() and not path.is_file()  # such as /dev/stdout
        if path.suffix not in endings and not device:
            ends = " or ".join(endings)
            raise click.BadParameter(
                f"{text!r} must end with {ends}; give {path.with_suffix(endings[0])}"
            )
        return path

    checked.__name__ = "FILE"  # which --help shows
    return checked


def dims(text: str) -> dict[str | int, int | None]:
    """cand=0,x=1,scale=none as batch_dims of fxsched.backend."""
    by_argument: dict[str | int, int | None] = {}
    for part in text.split(","):
        name, _, value = map(str.strip, part.rpartition("="))
        if not name or not (value.isdecimal() or value.lower() == "none"):
            raise click.BadParameter(
                f"{part!r} is not an argument and its dimension, such as x=1 or "
                "scale=none"
            )
        dim = int(value) if value.isdecimal() else None
        by_argument[int(name) if name.isdecimal() else name] = dim
    return by_argument
