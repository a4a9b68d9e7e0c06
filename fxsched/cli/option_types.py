"""How options are read where click has no type for it."""

from __future__ import annotations

from pathlib import Path

import click

from ..jobs.schedule import Schedule
from ..schedules import LIBRARY
from ..schedules.saved import load_schedule

COUNT, POSITION = click.IntRange(1), click.IntRange(0)
NUMBER = click.FloatRange(0)


def schedule(text: str | Schedule) -> str | Schedule:
    """A name of the library, as LIBRARY lists it; or what a .json file holds."""
    if isinstance(text, Schedule):
        return text
    return load_schedule(text) if text.endswith(".json") else LIBRARY.name(text)


def names(text: str) -> tuple[str, ...]:
    """Names of the library with commas between."""
    return tuple(dict.fromkeys(LIBRARY.name(part.strip()) for part in text.split(",")))


def file(text: str) -> Path:
    """Where to write, refused before there is anything to write."""
    path = Path(text)
    if path.is_dir():
        raise click.BadParameter(f"{text!r} is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise click.BadParameter(f"there is no folder {str(path.parent)!r}")
    return path


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
