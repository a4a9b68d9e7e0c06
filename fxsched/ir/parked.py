"""Activations that wait for B elsewhere: on another worker, on the host, or in a file.

The file has no name, so nothing is left of it however the process ends."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

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


class _Parked:
    """A value outside of the worker's memory. Tensors that share memory are there once,
    and share it again when they come back."""

    def __init__(self, where: str, lent: Sequence[int], value: Value) -> None:
        self.alone = isinstance(value, Tensor)
        self.tensors = [value] if isinstance(value, Tensor) else [*value]
        self.blocks: list[tuple[_OnHost | _InFile, dict[int, tuple[Any, ...]]]] = []
        by_storage: dict[int, list[int]] = {}
        for i, t in enumerate(self.tensors):
            plain = t.layout is torch.strided and not t.is_conj() and not t.is_neg()
            if i not in lent and plain and t.numel():
                by_storage.setdefault(t.untyped_storage()._cdata, []).append(i)
        for members in by_storage.values():
            ranges = [_range(self.tensors[i]) for i in members]
            first, last = min(ranges)[0], max(last for _, last in ranges)
            t = self.tensors[members[0]]
            memory = torch.empty(0, dtype=torch.uint8, device=t.device)
            memory.set_(t.untyped_storage(), first, (last - first,), (1,))
            views = {}
            for i in members:
                t, self.tensors[i] = self.tensors[i], torch.empty(0)
                offset = t.storage_offset() - first // t.itemsize
                views[i] = t.dtype, (offset, t.shape, t.stride())
            block = _OnHost(memory) if where == "host" else _InFile(memory)
            self.blocks.append((block, views))

    def value(self) -> Value:
        """The tensors, in new memory."""
        tensors = [*self.tensors]
        for block, views in self.blocks:
            memory = block.memory()
            for i, (dtype, view) in views.items():
                new = torch.empty(0, dtype=dtype, device=memory.device)
                tensors[i] = new.set_(memory.untyped_storage(), *view)
        return tensors[0] if self.alone else tuple(tensors)


def _range(t: Tensor) -> tuple[int, int]:
    """Where a tensor begins and ends, in bytes of its storage."""
    start = int(t.storage_offset()) * t.itemsize
    steps = zip(t.shape, t.stride(), strict=True)
    size = t.itemsize * (1 + int(sum((count - 1) * step for count, step in steps)))
    return start // ALIGNMENT * ALIGNMENT, start + size


class _OnHost:
    """Bytes in memory of the host, which CUDA copies while the host goes on."""

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
        self.file, self.room = _file(os.getpid()), -(-self.size // PAGE) * PAGE
        self.place = self.file.place(self.room)
        self._move(os.pwrite, memory.cpu())

    def memory(self) -> Tensor:
        """The bytes, on the device."""
        new = torch.empty(self.size, dtype=torch.uint8)
        self._move(lambda file, data, at: os.preadv(file, [data], at), new)
        return new.to(self.device)

    def _move(self, call: Any, memory: Tensor) -> None:
        own: Any = memory.numpy()
        data, folder = memoryview(own), self.file.folder
        while data:
            at = self.place + self.size - len(data)
            try:
                count = call(self.file.number, data, at)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                raise PlanError(
                    f"the file system of {folder} has no room for activations that "
                    f"wait on disk ({error.strerror}); set TMPDIR to a folder of one "
                    "with room, or let fewer jobs save there"
                ) from error
            assert count, f"the file of activations ends before byte {at}"
            data = data[count:]

    def __del__(self) -> None:
        if hasattr(self, "place"):
            self.file.free.setdefault(self.room, []).append(self.place)


class _File:
    """The file of a process; free: places by their bytes."""

    def __init__(self) -> None:
        self.folder = os.environ.get("TMPDIR") or tempfile.gettempdir()
        try:
            self.file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115
        except OSError as error:
            raise PlanError(
                f"activations wait on disk, but no file can be opened in {self.folder}:"
                f" {error.strerror}; set TMPDIR to a folder that can be written to"
            ) from error
        self.number, self.free = self.file.fileno(), dict[int, list[int]]()
        self.end, self.growing = 0, threading.Lock()

    def place(self, room: int) -> int:
        """A place for so many bytes, a free one if there is any."""
        try:
            return self.free[room].pop()
        except LookupError:
            with self.growing:
                self.end += room
                return self.end - room


@cache
def _file(process: int) -> _File:
    """The file of a process; a fork has one of its own."""
    return _File()
