"""Room for the frames of Python functions, so that calls don't ask the system for it.

CPython keeps frames in chunks of 16 KiB. Where a function stands at the end of one,
each call that it makes maps a new chunk and unmaps it, about 10 microseconds that a
stage pays for each of its operations. Releases that keep one chunk, the last of 3.13
and 3.14, don't need this: https://github.com/python/cpython/issues/142183.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# A frame that doesn't fit gets a chunk of a power of two that leaves another 1,000
# words; one of 7,200 gets 16,384, so that about 9,000 are free for what it calls.
WORDS = 7200


def call_with_room(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """function(*args, **kwargs), whose frames have a chunk of their own."""
    return function(*args, **kwargs)


call_with_room.__code__ = call_with_room.__code__.replace(co_stacksize=WORDS)
