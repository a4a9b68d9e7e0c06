"""Activations that wait for B elsewhere: on another worker, in pinned memory of the
host, or in a file of the run.

The file has no name, so nothing is left of it however the process ends. It is in the
folder TMPDIR, or else in tempfile.gettempdir().
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..jobs.job import PlanError

Value = Tensor | tuple[Tensor, ...]
ALIGNMENT, PAGE = 64, 4096  # of tensors in memory, and of blocks in a file


def offload(where: int | str, lent: Sequence[int], value: Value) -> Any:
    """Puts a value where it waits for B; gives a handle for `reload`.

    where: a worker, which holds the tensors; "host" or "disk". lent: positions of
        tensors that are rows of the batch, which stays there anyway.
    """
    return value if isinstance(where, int) else _Parked(where, lent, value)


def reload(handle: Any, *before: Any) -> Any:
    """The value of a handle.

    before: what it waits for, with order="dynamic".
    """
    return handle.value() if isinstance(handle, _Parked) else handle


class _View(NamedTuple):
    """A tensor's place in a block of memory, in elements."""

    block: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class _Parked:
    """A value outside of the worker's memory. Each byte is there once: tensors that
    share memory share it again when they come back."""

    def __init__(self, where: str, lent: Sequence[int], value: Value) -> None:
        self.alone = isinstance(value, Tensor)
        tensors = (value,) if isinstance(value, Tensor) else value
        self.parts: list[Tensor | _View] = list(tensors)
        self.blocks: list[_Pinned | _InFile] = []
        put = _Pinned if where == "host" else _InFile
        for first, last, members in _blocks(tensors, lent):
            storage, one = tensors[members[0]].untyped_storage(), tensors[members[0]]
            memory = torch.empty(0, dtype=torch.uint8, device=one.device)
            memory.set_(storage, first, (last - first,), (1,))
            for i in members:
                t = tensors[i]
                offset = int(t.storage_offset()) - first // t.itemsize
                view = _View(len(self.blocks), t.dtype, offset, t.shape, t.stride())
                self.parts[i] = view
            self.blocks.append(put(memory))

    def value(self) -> Value:
        """The tensors, in new memory."""
        blocks = [block.memory().untyped_storage() for block in self.blocks]
        tensors = []
        for part in self.parts:
            if isinstance(part, _View):
                block = blocks[part.block]
                new = torch.empty(0, dtype=part.dtype, device=block.device)
                part = new.set_(block, *part[2:])
            tensors.append(part)
        return tensors[0] if self.alone else tuple(tensors)


def _blocks(
    tensors: Sequence[Tensor], lent: Sequence[int]
) -> Iterator[tuple[int, int, list[int]]]:
    """Ranges of memory that tensors are in, in bytes of its storage, with the positions
    of these tensors."""
    spans = []
    for i, t in enumerate(tensors):
        plain = t.layout is torch.strided and not t.is_conj() and not t.is_neg()
        if i not in lent and plain and t.numel():
            start = int(t.storage_offset()) * t.itemsize
            steps = zip(t.shape, t.stride(), strict=True)
            size = 1 + int(sum((count - 1) * step for count, step in steps))
            storage = t.untyped_storage()._cdata
            spans.append((storage, start, start + size * t.itemsize, i))
    spans.sort()
    while spans:
        storage, start, last, i = spans.pop(0)
        members = [i]
        while spans and spans[0][0] == storage and spans[0][1] < last:
            _, _, end, i = spans.pop(0)
            last = max(last, end)
            members.append(i)
        yield start // ALIGNMENT * ALIGNMENT, last, members


class _Pinned:
    """Bytes on the host, which CUDA copies while the host goes on."""

    def __init__(self, memory: Tensor) -> None:
        self.device, size, pinned = memory.device, len(memory), memory.is_cuda
        self.copy = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self.copy.copy_(memory, non_blocking=True)

    def memory(self) -> Tensor:
        """The bytes, on the device."""
        return self.copy.to(self.device, non_blocking=True)


class _InFile:
    """Bytes in the file of this process; their place is free once this is gone."""

    def __init__(self, memory: Tensor) -> None:
        self.device, self.size = memory.device, len(memory)
        self.file = _file(os.getpid())
        self.room = -(-self.size // PAGE) * PAGE
        self.offset = self.file.place(self.room)
        self.file.write(_view(memory.cpu()), self.offset)

    def memory(self) -> Tensor:
        """The bytes, on the device."""
        new = torch.empty(self.size, dtype=torch.uint8)
        self.file.read(_view(new), self.offset)
        return new.to(self.device)

    def __del__(self) -> None:
        if hasattr(self, "offset"):
            self.file.free.setdefault(self.room, []).append(self.offset)


class _File:
    """A file without a name; free: places by their bytes."""

    def __init__(self) -> None:
        self.folder = os.environ.get("TMPDIR") or tempfile.gettempdir()
        try:
            self.file = tempfile.TemporaryFile(  # noqa: SIM115
                buffering=0, dir=self.folder
            )
        except OSError as error:
            raise PlanError(
                f"activations wait on disk, but no file can be opened in {self.folder}:"
                f" {error.strerror}; set TMPDIR to a folder that can be written to"
            ) from error
        self.free: dict[int, list[int]] = {}
        self.end, self.growing = 0, threading.Lock()

    def place(self, room: int) -> int:
        """A place for so many bytes, a free one if there is any."""
        try:
            return self.free[room].pop()
        except LookupError:
            with self.growing:
                self.end += room
                return self.end - room

    def write(self, data: memoryview, offset: int) -> None:
        """Writes bytes at a place."""
        while data:
            try:
                count = os.pwrite(self.file.fileno(), data, offset)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                raise PlanError(
                    f"the file system of {self.folder} has no room for activations "
                    f"that wait on disk ({error.strerror}); set TMPDIR to a folder of "
                    "one with room, or let fewer jobs save there"
                ) from error
            data, offset = data[count:], offset + count

    def read(self, data: memoryview, offset: int) -> None:
        """Reads bytes from a place."""
        while data:
            count = os.preadv(self.file.fileno(), [data], offset)
            assert count, f"the file of activations ends before byte {offset}"
            data, offset = data[count:], offset + count


def _view(memory: Tensor) -> memoryview:
    own: Any = memory.numpy()
    return memoryview(own)


@cache
def _file(process: int) -> _File:
    """The file of a process; a fork has one of its own."""
    return _File()
