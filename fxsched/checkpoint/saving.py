"""A save that runs in a thread while training goes on."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path


class Saving:
    """The result of fxsched.save(background=True).

    folder: the folder of the new checkpoint, which is complete after wait().
    """

    def __init__(self, folder: Path, work: Callable[[], object]) -> None:
        self.folder = folder
        self._error: BaseException | None = None
        # no daemon: Python ends after it
        self._thread = threading.Thread(None, self._run, "fxsched save", (work,))
        self._thread.start()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # raised by wait()
            self._error = error
            text = f"{type(error).__name__}: {error}"
            print(f"fxsched: a save in the background failed: {text}", file=sys.stderr)

    @property
    def done(self) -> bool:
        """Whether the save has ended, with or without an error."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Waits for the end of the save; returns the folder.

        If the save failed, the first call of wait() raises its error.
        """
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self.folder


_last: deque[Saving] = deque(maxlen=1)  # of this process


def start(folder: Path, work: Callable[[], object]) -> Saving:
    """Starts a save, the last one."""
    _last.append(Saving(folder, work))
    return _last[0]


def wait_for_last() -> None:
    """Waits for the last save in the background; raises what wait() hasn't yet."""
    while _last:
        _last.pop().wait()
