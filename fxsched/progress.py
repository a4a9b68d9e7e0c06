"""What fxsched says while it plans: a line for a plan, a bar or another line where it
takes long, and each pass for TORCH_LOGS="+fxsched".

It says it through Python's logger "fxsched", which TORCH_LOGS and torch._logging find
as they do any module's.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from contextvars import ContextVar
from types import TracebackType

from torch import fx
from tqdm import tqdm

from .ir.step import Step
from .transport.world import own_rank

LOG = logging.getLogger("fxsched")
PATIENCE = 2.0  # seconds before it is said
TICK = 0.5  # seconds after which it shows the time anew
EVERY = 10.0  # seconds from line to line, where there is no terminal
ROWS, WIDTH = 24, 80  # of a terminal that says it has none, for which tqdm hides bars
FORMAT = "{desc}, {elapsed}"


def tell(text: str, again: bool) -> None:
    """Says what users should know: on stderr, unless the program has set up logging,
    whose level and handlers decide then.

    again: whether the like has been said before; said to loggers alone.
    """
    if LOG.hasHandlers():
        LOG.info(text)
    elif not again and LOG.level <= logging.INFO and LOG.manager.disable < logging.INFO:
        print(f"fxsched: {text}", file=sys.stderr, flush=True)


class Progress:
    """How far what takes long is, from PATIENCE on: a bar on stderr, if that is a
    terminal or a notebook's, which is gone when done; elsewhere lines. Of rank 0 alone.

    phase: what takes long. quiet: whether nothing is shown, as inside of another
    Progress of the same thread.
    """

    def __init__(self, phase: str = "planning", quiet: bool = False) -> None:
        self.phase, self.quiet = phase, quiet
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self.at("")

    def __enter__(self) -> Progress:
        stream, notebook = sys.stderr, "ipykernel" in sys.modules
        bar = stream is not None and (notebook or stream.isatty())
        quiet = self.quiet or _shown.get() is not None
        self._token = _shown.set(self)
        if not quiet and not own_rank():
            say = self._tick if bar else self._lines
            self._thread = threading.Thread(target=say, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _shown.reset(self._token)
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def at(self, name: str, number: int = 0, of: int = 0) -> None:
        """What is done from now on; number: which of so many things it is, from 1."""
        self._name, self._began = name, time.perf_counter()
        self._share = f", {number} of {of}" * bool(of)

    def after(self, made: fx.GraphModule | Step) -> None:
        """Logs what the pass that has run made, for TORCH_LOGS="+fxsched"."""
        if LOG.isEnabledFor(logging.DEBUG):
            seconds = time.perf_counter() - self._began
            LOG.debug("after %s (%.2f s):\n%s", self._name, seconds, _text(made))

    def __str__(self) -> str:
        return f"{self.phase}: {self._name}{self._share}" if self._name else self.phase

    def _lines(self) -> None:
        seconds = PATIENCE
        while not self._done.wait(EVERY if seconds > PATIENCE else PATIENCE):
            tell(f"{self}, {seconds:g} s so far", False)
            seconds += EVERY

    def _tick(self) -> None:
        began = time.perf_counter()
        if self._done.wait(PATIENCE):
            return
        with tqdm(bar_format=FORMAT, leave=False, delay=TICK, nrows=ROWS) as bar:
            bar.ncols = bar.ncols if (bar.ncols or 0) > 0 else WIDTH
            bar.start_t -= time.perf_counter() - began
            bar.set_description_str(str(self))
            while not self._done.wait(TICK):
                bar.set_description_str(str(self))


_shown: ContextVar[Progress | None] = ContextVar("fxsched progress", default=None)


def _text(made: fx.GraphModule | Step) -> str:
    if isinstance(made, fx.GraphModule):
        return str(made.graph)
    return "\n".join(map(str, made.lines))
