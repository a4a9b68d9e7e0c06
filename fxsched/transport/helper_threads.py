"""Threads that wait, so that a worker need not."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Helpers:
    """Threads that wait for something, as many as there are waits at a time."""

    def __init__(self) -> None:
        self.waits: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.threads = self.waiting = 0
        self.changed = threading.Lock()

    def call(self, wait: Callable[[], None]) -> None:
        """Calls what waits for something, in a thread that nothing else waits in."""
        with self.changed:
            self.waiting += 1
            if self.waiting > self.threads:  # a daemon: a rank that fails exits anyway
                self.threads += 1
                name = f"fxsched waits {self.threads}"
                threading.Thread(None, self._call, name, daemon=True).start()
        self.waits.put(wait)

    def _call(self) -> None:
        while (wait := self.waits.get()) is not None:
            wait()
            del wait
            with self.changed:
                self.waiting -= 1

    def close(self) -> None:
        """Ends the threads, each once its wait is over."""
        with self.changed:
            for _ in range(self.threads):
                self.waits.put(None)
            self.threads = 0
