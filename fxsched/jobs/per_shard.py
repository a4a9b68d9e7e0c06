"""Functions of a schedule that may ask which shard of a stage they are asked about."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# The functions that may, and how many arguments come before the shard.
CALLED = {"w": 3, "n": 3, "u": 2, "version": 3}


@dataclass(frozen=True, eq=False, repr=False)
class PerShard:
    """A function of a schedule that takes a shard; called without one, shard 0.

    arguments: how many come before it.
    """

    function: Callable[..., Any]
    arguments: int

    def __repr__(self) -> str:
        return repr(self.function)

    def __call__(self, *given: Any) -> Any:
        if len(given) == self.arguments:
            return self.function(*given, 0)
        return self.function(*given)


def per_shard(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which can be called without a shard too."""
    if isinstance(function, PerShard) or not takes_shard(name, function):
        return function
    return PerShard(function, CALLED[name])


def as_per_shard(function: Callable[..., Any], other: Callable[..., Any]) -> Any:
    """A function that calls another: about a shard, if that is."""
    if isinstance(other, PerShard):
        return PerShard(function, other.arguments)
    return function


def for_shard(function: Callable[..., Any], shard: int) -> Callable[..., Any]:
    """A function of a schedule about one shard, without an argument for it."""
    if not shard or not isinstance(function, PerShard):
        return function

    def about(*arguments: Any) -> Any:
        return function(*arguments, shard)

    return about


def takes_shard(name: str, function: Callable[..., Any]) -> bool:
    """Whether a schedule's function has an argument for the shard: one more, which has
    no default (as in `lambda s, b, d, k=k: ..`) or is called p."""
    if isinstance(function, PerShard):
        return True
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of some functions it isn't known
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [each for each in parameters if each.kind in kinds]
    count = CALLED[name]
    if len(positional) <= count:
        return False
    last = positional[count]
    return last.default is inspect.Parameter.empty or last.name == "p"
