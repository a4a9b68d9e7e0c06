"""How errors in the use of fxsched that nobody catches are printed: without its frames,
and on ranks once."""

from __future__ import annotations

import signal
import sys
from functools import cache
from types import TracebackType

from .jobs.job import MISUSE, PlanError


@cache
def print_once() -> None:
    """Prints such errors so from now on; all others as before.

    Where rank 0 has printed the same text, another rank prints one line.
    """
    before = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, frames: TracebackType | None
    ) -> None:
        if not isinstance(error, PlanError) and MISUSE not in vars(error):
            before(kind, error, frames)
            return
        from .torch_compat.tracebacks import is_full, of_user
        from .transport import world

        if is_full():
            before(kind, error, frames)
            return
        text, rank = f"{kind.__name__}: {error}", world.own_rank()
        if rank and _is_said(text):
            said = f"the same {kind.__name__} arose on rank {rank} as on rank 0"
            print(said, file=sys.stderr, flush=True)
            return
        error.__traceback__ = of_user(frames)
        before(kind, error, error.__traceback__)
        if rank == 0:
            world.tell_error(text)

    sys.excepthook = hook


def _is_said(text: str) -> bool:
    """Whether rank 0 says it too. Meanwhile torchrun, which ends all ranks after the
    first, does not keep this one from saying something else."""
    from .transport import world

    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        return world.error_of_rank_0() == text
    finally:
        signal.signal(signal.SIGTERM, handler)
