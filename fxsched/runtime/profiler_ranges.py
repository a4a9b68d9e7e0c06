"""Jobs as ranges of torch.profiler, while one runs."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch.profiler import record_function


def open_range(name: str) -> AbstractContextManager[object] | None:
    """A range with a job's name, if a profiler runs; it ends in close_range."""
    # of the process: the thread's own flag is off in threads that a profiler looks
    # at by profile_all_threads
    if not torch.autograd.profiler._is_profiler_enabled:
        return None
    ranged: AbstractContextManager[object] = record_function(f"fxsched {name}")
    ranged.__enter__()
    return ranged


def close_range(ranged: AbstractContextManager[object] | None) -> None:
    """Ends what open_range gave."""
    if ranged is not None:
        ranged.__exit__(None, None, None)
