"""Whether what a user gives is a number, and errors of functions of theirs."""

from __future__ import annotations

import operator
import traceback
from math import inf
from numbers import Real
from pathlib import Path

from .job import PlanError

LARGEST = 100_000  # workers, microbatches or stages
OWN = str(Path(__file__).parents[1])
SHOWN = 80  # characters of a user's value in an error


def is_int(value: object) -> bool:
    """Whether a user's number is an int (numpy's too), but not a bool."""
    try:
        operator.index(value)  # type: ignore[arg-type]  # refuses most arrays
    except (TypeError, ValueError, RuntimeError):
        return False
    return not isinstance(value, bool)


def is_count(value: object, most: float = LARGEST) -> bool:
    """Whether a user's number is an int of 1 or more, and no more than `most`."""
    return is_int(value) and 1 <= operator.index(value) <= most  # type: ignore[arg-type]


def too_many(value: object) -> str:
    """What to add to an error about a count: the most there can be."""
    return f", {LARGEST:,} at most" if is_count(value, inf) else ""


def positive(name: str, **counts: object) -> None:
    """Raises PlanError for a count that isn't an int of 1 or more."""
    for argument, count in counts.items():
        if not is_count(count):
            raise PlanError(
                f"{name}({argument}={count!r}): give an int of 1 or more"
                f"{too_many(count)}"
            )


def flag(call: str, **flags: object) -> None:
    """Raises PlanError for what isn't True or False."""
    for argument, value in flags.items():
        if not isinstance(value, bool):
            raise PlanError(f"{call}({argument}={value!r}): give True or False")


def is_number(value: object) -> bool:
    """Whether a user's number is one (not an array, nor True), finite, and not below
    0."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    return real and 0 <= float(value) < inf  # type: ignore[arg-type]


def counted(count: int, noun: str) -> str:
    """1 stage, 2 stages."""
    several = "es" if noun.endswith("h") else "s"
    return f"{count} {noun}{several * (count != 1)}"


def shown(value: object) -> str:
    """A user's value in an error: its repr, or its kind where that is long."""
    text = repr(value)
    if "\n" in text or len(text) > SHOWN:
        return f"a {type(value).__name__}"
    return text


def raised(
    call: str, error: Exception, arguments: str, function: object = None
) -> PlanError:
    """The error for a function of the user's that raised: which call, what and where.

    arguments: what it is called with. function: it, or what records its answers.
    """
    if isinstance(error, PlanError):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    lines = [(f.filename, f.lineno) for f in frames if not f.filename.startswith(OWN)]
    code = getattr(getattr(function, "function", function), "__code__", None)
    if not lines and code is not None:  # it can't be called so
        lines = [(code.co_filename, code.co_firstlineno)]
    where = f" at {lines[-1][0]}:{lines[-1][1]}" if lines else ""
    return PlanError(
        f"{call} raised {type(error).__name__}: {error}{where}; it is called with "
        f"{arguments}"
    )
