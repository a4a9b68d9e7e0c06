"""Python's garbage collector, which looks at all graphs again and again while others
are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def referrers(value: object) -> list[object]:
    """What refers to a value, also among what gc.freeze() has put aside, which
    gc.get_referrers leaves out."""
    if not gc.get_freeze_count():
        return gc.get_referrers(value)
    gc.collect()  # else garbage would be put aside too
    gc.unfreeze()
    try:
        return gc.get_referrers(value)
    finally:
        gc.freeze()


@contextmanager
def no_collection() -> Iterator[None]:
    """While it is open, the garbage collector waits: for what makes many objects, and
    hardly any that it could let go of."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
