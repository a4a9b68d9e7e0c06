"""Random numbers that are not torch's: traced, they would be the same in each call."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..jobs.job import PlanError


@contextmanager
def without_drawn_numbers() -> Iterator[None]:
    """Raises PlanError if what is inside draws numbers of random or numpy.random."""
    python, numpy = random.getstate(), _numpy()
    before = numpy.get_state() if numpy else None
    try:
        yield
        drawn = ["random"] if random.getstate() != python else []
        if numpy and _text(numpy.get_state()) != _text(before):
            drawn.append("numpy.random")
    finally:
        random.setstate(python)
        if numpy:
            numpy.set_state(before)
    if drawn:
        raise PlanError(
            f"the model's forward draws numbers with {' and '.join(drawn)}, which "
            "tracing would make constants; draw them with torch (torch.rand), or "
            "outside of the model and pass them as tensors"
        )


def _numpy() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)


def _text(state: Any) -> str:
    parts = [each.tobytes() if hasattr(each, "tobytes") else each for each in state]
    return str(parts)
