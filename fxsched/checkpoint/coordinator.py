"""Who saves or loads together: all ranks, or this process alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..backend import Backend
from ..jobs.job import PlanError
from ..transport.processes import everyone
from ..transport.world import are_ranks

T = TypeVar("T")


class Coordinator:
    """All ranks, or this process alone, in one call.

    call: its name, in errors. Without a backend there are ranks where a process group
        of several is up. lane: see everyone.
    """

    def __init__(self, call: str, backend: Backend | None, lane: str = "") -> None:
        alone = not are_ranks() if backend is None else backend.alone
        self.call = call
        self.processes = None if alone else everyone(call, lane)
        self.rank = 0 if self.processes is None else self.processes.rank
        self.ranks = 1 if self.processes is None else self.processes.workers

    def each(self, what: str, work: Callable[[], T]) -> list[T]:
        """Each rank's result, once all have done their work.

        what: the work, as in "could not write". Where it fails on one rank, it is an
        error on all: that rank's own there, and on others a PlanError that quotes it.
        """
        if self.processes is None:
            return [work()]
        result: Any = None
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:  # raised below; the others wait for this rank
            failure = error
        text = None if failure is None else f"{type(failure).__name__}: {failure}"
        outcomes = self.processes.agree(f"{self.call}: {what}", (result, text))
        if failure is not None:
            raise failure
        for rank, (_, its) in enumerate(outcomes):
            if its is not None:
                raise PlanError(f"{self.call}: rank {rank} could not {what}: {its}")
        return [its for its, _ in outcomes]

    def local(self, what: str, work: Callable[[], T]) -> T:
        """This rank's result, once all have done their work."""
        results: list[T] = []
        self.each(what, lambda: results.append(work()))
        return results[0]

    def first(self, what: str, work: Callable[[], T]) -> T:
        """The result of rank 0, which alone does the work."""
        results = self.each(what, work if self.rank == 0 else _nothing)
        result: Any = results[0]
        return result  # type: ignore[no-any-return]


def _nothing() -> Any:
    return None
