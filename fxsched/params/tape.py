"""What constructors did to tensors, and the same done again for some of them.

A tensor is known by its storage and its place there, as memory is: views need no
operation of their own, and two names of one memory are one thing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..ir.graphs import same_strides
from ..jobs.job import PlanError


class Place(NamedTuple):
    """Where a tensor lies: its storage's number, and its layout there."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def of(self, storages: dict[int, Any]) -> Tensor:
        """The tensor in one of some real storages."""
        storage = storages[self.storage]
        tensor = torch.empty(0, dtype=self.dtype)
        return tensor.set_(storage, self.offset, self.shape, self.stride)


class Constant(NamedTuple):
    """The values that a tensor had when it was read."""

    tensor: Tensor

    @staticmethod
    def of(tensor: Tensor) -> Constant:
        """A copy of a tensor: numpy or `.data` may write into its memory unseen."""
        return Constant(same_strides(tensor))


@dataclass
class Operation:
    """One operation on tensors, with places and constants in its arguments.

    results: places of the new tensors that it returns, None for all else.
    reads, writes: numbers of storages.
    generator: what it draws random numbers from, if it does.
    state: that generator's state before it, unless it isn't drawn.
    default: PyTorch's default type as it ran; threads: how many it had, for LAPACK's
        results depend on them.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Place | None, ...]
    reads: set[int]
    writes: set[int]
    generator: torch.Generator | None = None
    state: Tensor | None = None
    default: torch.dtype = field(default_factory=torch.get_default_dtype)
    threads: int = field(default_factory=torch.get_num_threads)

    @property
    def touched(self) -> list[int]:
        """Numbers of the storages that it reads or writes."""
        return sorted(self.reads | self.writes)

    def run(self, storages: dict[int, Any]) -> None:
        """Runs it on real storages, which get those of its results."""

        def real(value: Any) -> Any:
            if isinstance(value, Place):
                return value.of(storages)
            if isinstance(value, Constant):
                return value.tensor
            return value

        args, kwargs = tree_map(real, (self.args, self.kwargs), is_leaf=is_recorded)
        default, threads = torch.get_default_dtype(), torch.get_num_threads()
        torch.set_default_dtype(self.default)
        if self.threads != threads:
            torch.set_num_threads(self.threads)
        try:
            with torch.no_grad():
                result = self.function(*args, **kwargs)
                for place, value in zip(self.results, tree_leaves(result), strict=True):
                    if place is not None and value is not None:
                        place.of(storages).copy_(value)
        finally:
            torch.set_default_dtype(default)
            if self.threads != threads:
                torch.set_num_threads(threads)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a value, in their order."""
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def is_recorded(value: Any) -> bool:
    """Whether a value stands for a tensor."""
    return isinstance(value, Place | Constant)


class Tape:
    """Operations in their order. sizes: of storages, in bytes."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.sizes: list[int] = []
        self.writers: dict[int, list[int]] = {}  # of a storage: their positions

    def storage(self, size: int) -> int:
        """The number of a new storage."""
        self.sizes.append(size)
        return len(self.sizes) - 1

    def add(self, operation: Operation) -> None:
        """Adds the next operation."""
        for number in sorted(operation.writes):
            self.writers.setdefault(number, []).append(len(self.operations))
        self.operations.append(operation)

    def needed(self, wanted: Iterable[int], end: int | None = None) -> list[Operation]:
        """The operations that values of some storages come of, in their order.

        end: before which operation the values are wanted.
        """
        stop = len(self.operations) if end is None else end
        waiting = [(number, stop) for number in wanted]
        chosen: set[int] = set()
        seen: dict[int, int] = {}  # up to where a storage's writers were looked at
        while waiting:
            number, stop = waiting.pop()
            before, seen[number] = seen.get(number, 0), max(seen.get(number, 0), stop)
            for position in self.writers.get(number, ()):
                if before <= position < stop and position not in chosen:
                    chosen.add(position)
                    touched = self.operations[position].touched
                    waiting += [(each, position) for each in touched]
        return [self.operations[position] for position in sorted(chosen)]

    def make(
        self, operations: Sequence[Operation], wanted: Iterable[int]
    ) -> dict[int, Any]:
        """The wanted storages, and others, as some operations, all that they need,
        leave them behind."""
        numbers = {*wanted, *(n for each in operations for n in each.touched)}
        storage: Any = torch.UntypedStorage
        storages = {n: storage(self.sizes[n]) for n in sorted(numbers)}
        for operation in operations:
            generator = operation.generator
            if generator is None:
                operation.run(storages)
                continue
            if operation.state is None:
                raise PlanError(
                    "deferred(draws=False) draws no random numbers, so weights that "
                    "are made of them have no values; load their values with "
                    "fxsched.load_weights or fxsched.load, or leave draws=False out"
                )
            before = generator.get_state()
            generator.set_state(operation.state)
            try:
                operation.run(storages)
            finally:
                generator.set_state(before)
        return storages

    def values(self, place: Place) -> Tensor:
        """A new tensor with the values of a place.

        Raises PlanError where they come of random numbers that aren't drawn.
        """
        wanted = [place.storage]
        return place.of(self.make(self.needed(wanted), wanted))
