"""Random numbers that are not torch's: traced, they would be the same in each call. And
seeds set in a model: traced, they would be set once."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from ..jobs.job import PlanError
from .user_frames import foreign

SEED, STATE = inspect.unwrap(torch.manual_seed).__code__, torch.set_rng_state.__code__


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


def refuse_seeding(frame: FrameType) -> None:
    """Raises PlanError where a model that is traced seeds torch's generator."""
    code, caller = frame.f_code, frame.f_back
    own = code is STATE and caller and not foreign(caller.f_code.co_filename)
    if code is SEED or own:  # fork_rng sets the state back
        raise PlanError(
            f"the model's forward calls torch.{code.co_name}, which would happen "
            "once, while it is traced, and not in each call; call it before the model"
        )


def _numpy() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)


def _text(state: Any) -> str:
    parts = [each.tobytes() if hasattr(each, "tobytes") else each for each in state]
    return str(parts)
