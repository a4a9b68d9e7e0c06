"""What ranks write of themselves for all to read, in the store of the process group.

The process that holds the store may be frozen or cut off, and what asks it would wait
for ever. So a thread asks, and is given up after a time.
"""

from __future__ import annotations

import json
import math
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import NamedTuple, Protocol, TypeVar

from .helper_threads import Helpers

T = TypeVar("T")
TICK = 0.5  # seconds between two looks at the board


class Mark(NamedTuple):
    """What a message is of: the call and the plan, by number, and a number that is
    equal for equal inputs (0 if nobody compares them)."""

    call: int
    plan: int
    inputs: int = 0


class Status(NamedTuple):
    """What a rank has written of itself.

    kind: "here", "waits", "plans", "failed", "departed" (failed because it is apart
        from another; "apart" in all of its groups), "lost" (a connection), "closed" or
        "ended" (its script). plans: how many it has begun. text: for people.
    whom: the rank that it waits for; None for all. beat: another number every TICK.
    group: the number of what connects the ranks that it waits for.
    """

    kind: str
    mark: Mark
    plans: int
    text: str
    whom: int | None = None
    beat: int = 0
    group: int = 0


class Store(Protocol):
    """What is used of torch.distributed's stores."""

    def set(self, key: str, value: str) -> None:
        """Writes a value, which all ranks can read."""

    def get(self, key: str) -> bytes:
        """A key's value; waits until there is one."""

    def check(self, keys: list[str]) -> bool:
        """Whether all of these keys have values."""


class Board:
    """A store that answers within `limit` seconds, or never again.

    Its methods raise TimeoutError if it does not, and the store's own errors.
    until, asked: when a wait for a rank ends, on time.monotonic(), and what is called
        every TICK if the store does not answer in that wait.
    """

    def __init__(self, store: Store, limit: float) -> None:
        self.store, self.limit = store, limit
        self.silent, self.closed = 0.0, False  # seconds without an answer
        self.until = math.inf
        self.asked: Callable[[], None] = lambda: None
        self.helpers = Helpers()
        weakref.finalize(self, self.helpers.close)

    def write(self, key: str, status: Status) -> None:
        """Tells what a rank is at."""
        self.set(key, json.dumps(status))

    def read(self, key: str) -> Status:
        """What a rank last wrote."""
        kind, mark, *rest = json.loads(self.get(key))
        return Status(kind, Mark(*mark), *rest)

    def set(self, key: str, value: str) -> None:
        """As Store.set."""
        self._ask(lambda: self.store.set(key, value))

    def get(self, key: str) -> bytes:
        """As Store.get."""
        return self._ask(lambda: self.store.get(key))

    def check(self, keys: list[str]) -> bool:
        """As Store.check."""
        return self._ask(lambda: self.store.check(keys))

    def _ask(self, question: Callable[[], T]) -> T:
        if self.closed:
            return question()
        if not self.silent:
            answer = self.helpers.call(question)
            if self._is_answered(answer):
                return answer.result()
        raise TimeoutError(
            f"the store of the process group has not answered for {self.silent:.3g} s: "
            "the process that holds it, rank 0 or torchrun's, is frozen or cut off"
        )

    def _is_answered(self, answer: Future[T]) -> bool:
        began = time.monotonic()
        until = min(began + self.limit, max(self.until, began + TICK))
        while (now := time.monotonic()) < until:
            if wait([answer], min(TICK, until - now)).done:
                return True
            self.asked()
        self.silent = now - began
        return False

    def close(self) -> None:
        """Ends the thread that asks; from then on the store is asked itself."""
        self.closed = True
        self.helpers.close()
