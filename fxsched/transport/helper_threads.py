"""Threads that wait, so that a worker need not."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
Wait = tuple[Future[Any], Callable[[], Any]]


class Helpers:
    """Threads that wait for something, as many as there are waits at a time."""

    def __init__(self) -> None:
        self.waits: queue.SimpleQueue[Wait | None] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []
        self.waiting = 0
        self.changed = threading.Lock()

    def call(self, wait: Callable[[], T]) -> Future[T]:
        """Calls what waits for something, in a thread that nothing else waits in; the
        future has what it gives."""
        found: Future[T] = Future()
        with self.changed:
            self.waiting += 1
            if self.waiting > len(self.threads):
                name = f"fxsched waits {len(self.threads) + 1}"
                # a daemon: a rank that fails exits anyway
                thread = threading.Thread(None, self._call, name, daemon=True)
                self.threads.append(thread)
                thread.start()
        self.waits.put((found, wait))
        return found

    def _call(self) -> None:
        while (wait := self.waits.get()) is not None:
            answer(*wait)
            del wait
            with self.changed:
                self.waiting -= 1

    def close(self) -> None:
        """Ends the threads, each once its wait is over; nothing waits here any more."""
        with self.changed:
            for _ in self.threads:
                self.waits.put(None)

    def end(self, seconds: float) -> None:
        """Ends them before Python does, which aborts the process where one is inside
        torch.distributed; waits at most so long for those whose wait is not over."""
        self.close()
        due = time.monotonic() + seconds
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(max(due - time.monotonic(), 0.0))


def answer(found: Future[T], function: Callable[[], T]) -> BaseException | None:
    """Gives a future what a function gives, or the error, which is returned too."""
    try:
        found.set_result(function())
    except BaseException as error:
        found.set_exception(error)
        return error
    return None
