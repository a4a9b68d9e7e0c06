"""Random generators, moved on over what operations draw without keeping the numbers."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from .tape import Operation, Place, Tape

CHUNK = 1 << 18  # elements; PyTorch draws 16 at once, and the last 16 again
FILLS = (torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default)


def draw(tape: Tape, operation: Operation) -> None:
    """Draws what the last operation of a tape draws, and drops it: its generator is
    where an ordinary build has it, also for those who ask for its state or set it."""
    target: Any = operation.args[0] if operation.args else None
    if operation.function in FILLS and _is_long(target):
        left = prod(target.shape)
        scratch = torch.empty(2 * CHUNK, dtype=target.dtype)
        while left:  # the last part has CHUNK elements or more
            size = CHUNK if left >= 2 * CHUNK else left
            operation.function(scratch[:size], *operation.args[1:], **operation.kwargs)
            left -= size
        return
    before = tape.needed(operation.touched, len(tape.operations) - 1)
    operation.run(tape.make(before, operation.touched))


def _is_long(place: Any) -> bool:
    """Whether a tensor on the CPU, which is filled in its order, is long."""
    if not isinstance(place, Place) or prod(place.shape) < 2 * CHUNK:
        return False
    return torch.empty_strided(place.shape, place.stride, device="meta").is_contiguous()
