"""Memory for what comes over the network, which is used again once no tensor is in it.

Steps receive the same sizes again and again. malloc would leave gaps: before glibc 2.38
it doesn't find freed memory for an aligned block of the same size.
"""

from __future__ import annotations

import mmap
import weakref

import torch
from torch import Tensor

from ..ir.graphs import Spec
from .memory_blocks import block_size

LEAST = 1 << 16  # bytes; malloc has lists of its own for what is smaller


class ReceiveBuffers:
    """The buffers of a rank; all of them live as long as a tensor is in them."""

    def __init__(self) -> None:
        self.free: dict[int, list[mmap.mmap]] = {}  # by size

    def empty(self, spec: Spec) -> Tensor:
        """A new tensor like this, its contents undefined."""
        pairs = zip(spec.shape, spec.stride, strict=True)
        count = 1 + sum((length - 1) * step for length, step in pairs)
        size = count * spec.dtype.itemsize
        if size < LEAST or spec.device.type != "cpu":
            return spec.empty()
        free = self.free.setdefault(block_size(size), [])
        memory = free.pop() if free else mmap.mmap(-1, block_size(size))
        view = memoryview(memory)
        weakref.finalize(view, free.append, memory).atexit = False
        flat = torch.frombuffer(view, dtype=spec.dtype, count=count)
        return flat.as_strided(spec.shape, spec.stride)
