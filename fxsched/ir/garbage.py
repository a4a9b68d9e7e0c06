"""Python's garbage collector, which looks at all graphs again and again while others
are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def nothing_frozen() -> Iterator[None]:
    """While it is open, gc.get_referrers also finds what gc.freeze() has put aside."""
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.collect()  # else what could be let go of would be put aside too
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
