"""How options are read: each kind of value is a function that says what is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import click

Kind = Callable[[Any], Any]


def count(text: object) -> int:
    found = _int(text)
    if found is None or found < 1:
        raise click.BadParameter(f"{text!r} is not an integer of 1 or more")
    return found


def integer(text: object) -> int:
    found = _int(text)
    if found is None:
        raise click.BadParameter(f"{text!r} is not an integer")
    return found


def position(text: object) -> int:
    found = _int(text)
    if found is None or found < 0:
        raise click.BadParameter(f"{text!r} is not an integer of 0 or more")
    return found


def _int(text: object) -> int | None:
    """Text as an int of up to nine digits, more of anything than a machine holds."""
    digits = str(text).removeprefix("-")
    return int(str(text)) if digits.isdecimal() and len(digits) < 10 else None


def number(text: object) -> float:
    try:
        found = float(str(text))
    except ValueError:
        found = float("nan")
    if not 0 <= found < 1e100:
        raise click.BadParameter(f"{text!r} is not a number of 0 or more")
    return found


def file(text: object) -> Path:
    path = Path(str(text))
    if path.is_dir():
        raise click.BadParameter(f"{str(path)!r} is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise click.BadParameter(f"there is no folder {str(path.parent)!r}")
    return path


def choice(names: Collection[str]) -> Kind:
    """One of some names; a mistake is answered with all, and the nearest."""

    def name(text: object) -> str:
        if text not in names:
            near = choose(str(text), names)
            raise click.BadParameter(f"there is no {text!r} {near}")
        return str(text)

    return name


def choices(known: Collection[str]) -> Kind:
    """Some of the names, with commas between."""
    one = choice(known)

    def names(text: object) -> tuple[str, ...]:
        return tuple(dict.fromkeys(one(part.strip()) for part in str(text).split(",")))

    return names


def dims(text: object) -> dict[str | int, int | None]:
    """cand=0,x=1,scale=none as batch_dims of fxsched.backend."""
    found: dict[str | int, int | None] = {}
    for part in str(text).split(","):
        name, _, value = part.rpartition("=")
        dim = _int(value)
        if not name.strip() or (dim is None and value.strip().lower() != "none"):
            raise click.BadParameter(
                f"{part!r} is not an argument and its dimension, such as x=1 or "
                "scale=none"
            )
        known = _int(name.strip())
        found[name.strip() if known is None else known] = dim
    return found


def choose(text: str, names: Collection[str]) -> str:
    """What to say about a name that isn't one of `names`."""
    if not names:
        return "(there is nothing to choose from)"
    said = f"(choose from {', '.join(names)})"
    near = nearest(text, names)
    return f"{said}; did you mean {near}?" if near else said


def nearest(text: str, names: Collection[str]) -> str | None:
    near = difflib.get_close_matches(text, names, 1)
    return next(iter(near or difflib.get_close_matches(text.lower(), names, 1)), None)
