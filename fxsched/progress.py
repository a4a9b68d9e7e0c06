"""What fxsched says while it plans: a line for a plan, a bar or another line where it
takes long, and each pass for TORCH_LOGS="+fxsched".

It says it through Python's logger "fxsched", which TORCH_LOGS and torch._logging find
as they do any module's.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from types import TracebackType

from torch import fx
from tqdm import tqdm

from .ir.step import Step

LOG = logging.getLogger("fxsched")
PATIENCE = 2.0  # seconds of planning before it is said
TICK = 0.5  # seconds after which it shows the time anew
FORMAT = "planning: {desc}, {elapsed}"


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
    """How far planning is, from PATIENCE on, with the name of what is being done: a bar
    on stderr, if that is a terminal or a notebook's, which is gone when done; elsewhere
    a line, of rank 0."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._name, self._began = "", time.perf_counter()

    def __enter__(self) -> Progress:
        stream, notebook = sys.stderr, "ipykernel" in sys.modules
        bar = stream is not None and (notebook or stream.isatty())
        if bar or os.environ.get("RANK", "0") == "0":
            say = self._tick if bar else self._line
            self._thread = threading.Thread(target=say, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def at(self, name: str) -> None:
        """What is done from now on."""
        self._name, self._began = name, time.perf_counter()

    def after(self, made: fx.GraphModule | Step) -> None:
        """Logs what the pass that has run made, for TORCH_LOGS="+fxsched"."""
        if LOG.isEnabledFor(logging.DEBUG):
            seconds = time.perf_counter() - self._began
            LOG.debug("after %s (%.2f s):\n%s", self._name, seconds, _text(made))

    def _line(self) -> None:
        if not self._done.wait(PATIENCE):
            tell(f"planning takes more than {PATIENCE:g} s; now {self._name}", False)

    def _tick(self) -> None:
        began = time.perf_counter()
        if self._done.wait(PATIENCE):
            return
        with tqdm(desc=self._name, bar_format=FORMAT, leave=False) as bar:
            bar.start_t -= time.perf_counter() - began
            while not self._done.wait(TICK):
                bar.set_description_str(self._name)


def _text(made: fx.GraphModule | Step) -> str:
    if isinstance(made, fx.GraphModule):
        return str(made.graph)
    return "\n".join(map(str, made.lines))
