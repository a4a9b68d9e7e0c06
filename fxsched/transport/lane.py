"""Calls that wait, made one after the other by a thread beside a worker's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from .helper_threads import Helpers, answer

_HELPERS = Helpers()


class Lane:
    """Calls that a thread makes one after the other, in the order in which they came.

    failed: is told of the first error; no call is made after it. helpers: the threads.
    task, thread: which call runs, and where.
    """

    def __init__(
        self,
        failed: Callable[[BaseException], None] = lambda error: None,
        helpers: Helpers = _HELPERS,
    ) -> None:
        self.failed, self.helpers = failed, helpers
        self.calls: deque[tuple[Future[Any], str, Callable[[], Any]]] = deque()
        self.changed = threading.Condition()
        self.runs = False
        self.error: BaseException | None = None
        self.task, self.thread = "", 0
        self.inference = torch.is_inference_mode_enabled()

    def call(self, task: str, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Has a function called; the future has what it gives."""
        found: Future[Any] = Future()
        with self.changed:
            self.calls.append((found, task, lambda: function(*args)))
            if self.runs:
                return found
            self.runs = True
        self.helpers.call(self._run)
        return found

    def _run(self) -> None:
        self.thread = threading.get_ident()
        with torch.inference_mode(self.inference), torch.no_grad():
            while True:
                with self.changed:
                    if not self.calls:
                        self.runs, self.thread = False, 0
                        self.changed.notify_all()
                        return
                    future, self.task, function = self.calls.popleft()
                if self.error is not None:
                    future.set_exception(self.error)
                else:
                    self.error = answer(future, function)
                    if self.error is not None:
                        self.failed(self.error)
                del future, function

    def finish(self) -> None:
        """Waits until all calls are made; raises the first error."""
        with self.changed:
            self.changed.wait_for(lambda: not self.runs)
        if self.error is not None:
            raise self.error
