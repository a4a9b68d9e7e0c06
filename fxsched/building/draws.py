"""Random generators, moved on over what operations draw without keeping the numbers."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from .tape import Operation, Place, Tape

CHUNK = 1 << 18  # elements; PyTorch draws 16 at once, and the last 16 again
FILLS = (torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default)


class Draws:
    """The states of generators along a tape.

    Nothing is drawn while a tape is recorded: a generator keeps its state, and another
    one in its place means that the user has set it.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.seen: dict[torch.Generator, Tensor] = {}  # states as they were found
        self.now: dict[torch.Generator, Tensor] = {}  # states after what was drawn
        self.position = 0  # of the first operation that isn't drawn yet

    def note(self, generator: torch.Generator) -> Tensor | None:
        """Its state, if it was set since it was last noted."""
        state = generator.get_state()
        before = self.seen.get(generator)
        self.seen[generator] = state
        return None if before is not None and torch.equal(before, state) else state

    def advance(self) -> None:
        """Notes the generators' states before each operation up to the last."""
        for position in range(self.position, len(self.tape.operations)):
            operation = self.tape.operations[position]
            generator = operation.generator
            if generator is None:
                continue
            if operation.seeded is not None:
                self.now[generator] = operation.seeded
            operation.state = self.now[generator]
            generator.set_state(operation.state)
            try:
                self._draw(operation, position)
                self.now[generator] = generator.get_state()
            finally:
                generator.set_state(self.seen[generator])
        self.position = len(self.tape.operations)

    def leave(self) -> None:
        """Puts generators where they would be if all had been drawn, but for those
        that the user has set since."""
        for generator, state in self.now.items():
            if torch.equal(generator.get_state(), self.seen[generator]):
                generator.set_state(state)

    def _draw(self, operation: Operation, position: int) -> None:
        """Draws what an operation draws, and drops it."""
        target: Any = operation.args[0] if operation.args else None
        if operation.function in FILLS and _is_long(target):
            left = prod(target.shape)
            scratch = torch.empty(2 * CHUNK, dtype=target.dtype)
            while left:  # the last part has CHUNK elements or more
                size = CHUNK if left >= 2 * CHUNK else left
                operation.function(
                    scratch[:size], *operation.args[1:], **operation.kwargs
                )
                left -= size
            return
        before = self.tape.needed(operation.touched, position)
        operation.run(self.tape.make(before, operation.touched))


def _is_long(place: Any) -> bool:
    """Whether a tensor on the CPU, which is filled in its order, is long."""
    dense = isinstance(place, Place) and _contiguous(place)
    return dense and prod(place.shape) >= 2 * CHUNK


def _contiguous(place: Place) -> bool:
    expected = 1
    for size, stride in zip(reversed(place.shape), reversed(place.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
