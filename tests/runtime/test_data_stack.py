"""Frames of a step have room, however deep the caller stands."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fxsched.runtime.data_stack import call_with_room
from fxsched.runtime.run import Run

CALLS = 400
CHUNK = 2048  # words


def leaf() -> None:
    """A frame of 40 words."""


leaf.__code__ = leaf.__code__.replace(co_stacksize=40)


def page_faults() -> int:
    """Of this thread so far."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def faults_of_calls(tangents: Any = None) -> dict[str, int]:
    """How many pages CALLS calls of leaf() touch anew."""
    leaf()
    before = page_faults()
    for _ in range(CALLS):
        leaf()
    return {"faults": page_faults() - before}


def at_depth(words: int, function: Callable[[], Any]) -> Any:
    """function(), from a frame of so many words."""

    def deep() -> Any:
        return function()

    deep.__code__ = deep.__code__.replace(co_stacksize=words)
    return deep()


class Calls(Run):
    """A step that calls leaf()."""

    go_on = staticmethod(faults_of_calls)  # type: ignore[assignment]


class NoEndpoint:
    """An endpoint of a step without messages."""

    def finish(self) -> None:
        """Does nothing."""


@pytest.mark.parametrize("direct", [True, False])
def test_calls_map_no_memory_from_any_depth(direct: bool) -> None:
    run = Calls(0, {}, NoEndpoint(), None, False)  # type: ignore[arg-type]
    most = 0
    with torch.no_grad():
        for words in range(8, CHUNK, 16):
            if direct:
                found = at_depth(words, lambda: call_with_room(faults_of_calls))
            else:
                found = at_depth(words, run.advance)
            most = max(most, found["faults"])
    assert most < CALLS / 4


def test_results_and_errors_are_those_of_the_function() -> None:
    assert call_with_room(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        call_with_room(divmod, 7, 0)
