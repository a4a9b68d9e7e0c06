"""A function of PyTorch replaced, once, by one that calls it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

OURS = "fxsched"  # the attribute that tells the new function


def replace_once(
    owners: tuple[Any, ...], name: str, around: Callable[..., Any]
) -> None:
    """Replaces the function `name` of modules or classes, the same of all, by one that
    calls around(function, *arguments); does nothing the second time."""
    real = getattr(owners[0], name)
    if OURS in vars(real):
        return

    @wraps(real)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return around(real, *args, **kwargs)

    vars(replaced)[OURS] = True
    for owner in owners:
        setattr(owner, name, replaced)
