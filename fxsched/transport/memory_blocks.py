"""Blocks of shared memory that ranks of one host lend each other."""

from __future__ import annotations

import mmap
import os
import weakref
from typing import Any

import torch
from torch import Tensor

from .wire_format import ALIGNMENT, Packing

BUSY, FREE = 1, 0  # the first byte of a block; its contents start at ALIGNMENT


class Block:
    """Shared memory for one parcel at a time."""

    def __init__(self, number: int, descriptor: int, size: int) -> None:
        self.number, self.process = number, os.getpid()
        self.memory = mmap.mmap(descriptor, size)
        os.close(descriptor)  # the mapping stays
        self.reader: weakref.ref[memoryview] | None = None

    def bytes(self) -> Tensor:
        """The contents; once no tensor of them is left, the block is free."""
        view = memoryview(self.memory)
        self.reader = weakref.ref(view, self._free)
        return torch.frombuffer(view, dtype=torch.uint8, offset=ALIGNMENT)

    def _free(self, _: weakref.ref[memoryview]) -> None:
        if os.getpid() == self.process:  # a fork's copy goes, the tensor is still here
            self.memory[0] = FREE


class Copied:
    """What was in a block, which is free again."""

    def __init__(self, block: Block, size: int) -> None:
        self.contents = block.bytes()[:size].clone()

    def bytes(self) -> Tensor:
        """The block's contents."""
        return self.contents


class Lent(Block):
    """A block that this rank writes to, in any mode of torch."""

    @torch.inference_mode(mode=False)
    def __init__(self, number: int, descriptor: int, size: int) -> None:
        super().__init__(number, descriptor, size)
        self.contents = torch.frombuffer(
            self.memory, dtype=torch.uint8, offset=ALIGNMENT
        )
        self.size = size
        self.views: dict[Packing, list[Tensor]] = {}

    def write(self, packing: Packing, value: Any) -> None:
        """Writes a value into the block."""
        tensors = (value,) if isinstance(value, Tensor) else value
        if packing not in self.views:
            with torch.inference_mode(mode=False):
                self.views[packing] = packing.views(self.contents)
        packing.write(self.views[packing], tensors)


def block_size(size: int) -> int:
    """The size of a new block for so many bytes, with room for somewhat larger parcels
    later: up to a quarter more, which takes no memory until it is written to."""
    step = max(mmap.PAGESIZE, 1 << size.bit_length() >> 3)
    return -(-size // step) * step
