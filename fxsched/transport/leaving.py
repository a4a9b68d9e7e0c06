"""What a rank has sent over torch.distributed and has not left it yet."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from torch import Tensor

from .helper_threads import Helpers


class Leaving:
    """Sends to one peer, whose buffers a thread frees as soon as each has left.

    The works of torch.distributed can't be asked whether they are done, so the thread
    waits for one after the other, as they leave.
    """

    def __init__(self, helpers: Helpers) -> None:
        self.helpers = helpers
        self.sends: deque[tuple[Callable[[], object], Tensor]] = deque()
        self.changed = threading.Condition()
        self.waits = False  # whether a thread does
        self.error: RuntimeError | None = None

    def add(self, wait: Callable[[], object], buffer: Tensor) -> None:
        """A send that has begun. wait: waits until it has left."""
        with self.changed:
            self.sends.append((wait, buffer))
            if self.waits:
                return
            self.waits = True
        self.helpers.call(self._free)

    def _free(self) -> None:
        while True:
            with self.changed:
                if not self.sends or self.error:
                    self.waits = False
                    self.changed.notify_all()
                    return
                wait = self.sends[0][0]
            try:
                wait()
            except RuntimeError as error:  # the peer is gone
                self.error = error
                continue
            del wait
            self.sends.popleft()

    def wait(self) -> None:
        """Waits until all has left; RuntimeError if the peer is gone."""
        with self.changed:
            self.changed.wait_for(lambda: not self.waits)
        if self.error is not None:
            raise self.error
