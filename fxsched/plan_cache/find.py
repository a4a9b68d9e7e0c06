"""Finds what a plan is made from on disk, or has it made and keeps it there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import fx

from ..ir.request import Request
from ..jobs.schedule import Schedule
from ..progress import LOG
from .folder import folder, keep, kept_plan
from .graph_files import packed
from .key import plan_key
from .recorded_callbacks import CallbackRecord

T = TypeVar("T")

WORTH = 1.0  # seconds of planning from which it is kept


def found_or_made(
    gm: fx.GraphModule,
    args: Sequence[Any],
    request: Request,
    more: Sequence[Any],
    make: Callable[[Schedule], T],
    shapes: bool,
) -> T:
    """What `make` makes of Dynamo's graph, its arguments, the request and no more than
    plain values, or what it made at an earlier start.

    make: is given the request's schedule, which it may ask what it wants.
    shapes: whether inputs of graphs keep their fake values.
    What cannot be told from another, read or written is made anew; the log says why.
    """
    place = key = found = None
    with _logged("no plan is looked up"):
        place = folder()
        if place is not None:
            key = plan_key(gm, args, request, more)
            found = kept_plan(place, key, request.schedule)
    if found is not None:
        LOG.debug("planned at an earlier start, in %s: %s", place, key)
        return found  # type: ignore[no-any-return]
    if place is None or key is None:
        return make(request.schedule)
    asked, began = CallbackRecord(), time.perf_counter()
    made = make(asked.listen(request.schedule))
    if time.perf_counter() - began >= WORTH:
        with _logged("the plan is not kept"):
            keep(place, key, asked, packed(made, shapes))
    asked.end()
    return made


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """Errors of what only saves time are for the log."""
    try:
        yield
    except Exception as error:
        LOG.debug("%s: %s", what, error, exc_info=True)
