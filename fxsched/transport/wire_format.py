"""What goes between two workers: who, which value, and how it lies in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ir.graphs import Spec, Specs
from ..ir.pieces import layout_of

ALIGNMENT = 64  # bytes between the tensors of a bundle
LARGE = 1 << 16  # bytes of a tensor that a copy into a bundle would cost too much


@dataclass(frozen=True, eq=False)
class Parcel:
    """A value on its way: the other worker, a number, and what it looks like.

    weights: whether it is a fetch, which has to wait until the receiver has room.
    outlives_step: whether it is sent to be given to the user, who may keep it for long.
    """

    peer: int
    tag: int
    specs: Specs
    bundle: bool
    weights: bool
    outlives_step: bool = False

    @cached_property
    def packing(self) -> Packing:
        """All tensors of the value, one after the other."""
        return packing_of(self.specs)

    @cached_property
    def zero_copy(self) -> tuple[int, ...]:
        """Positions of the tensors whose memory can be sent as it is."""
        return tuple(
            i
            for i, spec in enumerate(self.specs)
            if spec.bytes and (spec.bytes >= LARGE or not self.bundle)
            if _is_plain(spec)
        )

    @cached_property
    def rest(self) -> Packing:
        """The other tensors, one after the other."""
        others = (s for i, s in enumerate(self.specs) if i not in self.zero_copy)
        return packing_of(tuple(others))

    def buffers(self, value: Any, device: torch.device) -> list[Tensor]:
        """What is sent of a value, in memory of a device."""
        tensors = value if self.bundle else (value,)
        whole = (tensors[i].contiguous().resolve_neg() for i in self.zero_copy)
        found = [_moved(tensor, device) for tensor in whole]
        rest = [t for i, t in enumerate(tensors) if i not in self.zero_copy]
        if rest or not found:
            buffer = self._bytes(device)
            self.rest.write(self.rest.views(buffer), rest)
            found.append(buffer)
        return found

    def empty(self, device: torch.device) -> list[Tensor]:
        """Memory of a device for what `buffers` gives."""
        whole = (self.specs[i] for i in self.zero_copy)
        found = [
            _empty(spec.shape, spec.dtype, device, spec.device.type != device.type)
            for spec in whole
        ]
        if len(found) < len(self.specs) or not found:
            found.append(self._bytes(device))
        return found

    def _bytes(self, device: torch.device) -> Tensor:
        staged = any(spec.device.type != device.type for spec in self.specs)
        return _empty((max(1, self.rest.bytes),), torch.uint8, device, staged)

    def value(self, buffers: Sequence[Tensor]) -> Any:
        """The value that buffers hold."""
        whole = dict(zip(self.zero_copy, buffers, strict=False))
        packed = buffers[-1] if len(whole) < len(self.specs) else None
        rest = iter([] if packed is None else self.rest.read(self.rest.views(packed)))
        tensors = [
            whole[i].to(spec.device) if i in whole else next(rest)
            for i, spec in enumerate(self.specs)
        ]
        return tuple(tensors) if self.bundle else tensors[0]


@dataclass(frozen=True, eq=False)
class AllReduce:
    """A bundle that several workers add up, each in the memory of its own.

    workers: in the order in which they are added up. tag: its number.
    """

    workers: tuple[int, ...]
    tag: int
    specs: Specs
    peer = None  # it waits for all of them

    @cached_property
    def together(self) -> list[list[int]]:
        """Positions of tensors that are added up as one, since each is small."""
        found: dict[torch.dtype, list[int]] = {}
        for i, spec in enumerate(self.specs):
            if spec.bytes < LARGE:
                found.setdefault(spec.dtype, []).append(i)
        return [*found.values()]

    @property
    def alone(self) -> list[int]:
        """Positions of the others."""
        return [i for i, spec in enumerate(self.specs) if spec.bytes >= LARGE]

    def buffers(self, value: Sequence[Tensor]) -> list[Tensor]:
        """1-d tensors to be added up: those alone in their own memory, if it has no
        gaps."""
        pairs = zip(layout_of(self.specs), value, strict=True)
        flat = [tensor.permute(order).reshape(-1) for (order, _), tensor in pairs]
        joined = (torch.cat([flat[i] for i in each]) for each in self.together)
        return [*map(flat.__getitem__, self.alone), *joined]

    def value(self, buffers: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The bundle that the sums in buffers are, in their memory."""
        alone = dict(zip(self.alone, buffers, strict=False))
        for each, buffer in zip(self.together, buffers[len(alone) :], strict=True):
            sizes = [prod(self.specs[i].shape) for i in each]
            alone |= zip(each, torch.split(buffer, sizes), strict=True)
        found = []
        for i, (order, shape) in enumerate(layout_of(self.specs)):
            back = sorted(range(len(order)), key=order.__getitem__)
            found.append(alone[i].view(shape).permute(back))
        return tuple(found)


def _is_plain(spec: Spec) -> bool:
    """Whether a tensor's memory is just what is sent of it."""
    shape = torch.empty_strided(spec.shape, spec.stride, device="meta")
    return shape.is_contiguous() and not spec.dtype.is_complex


def _empty(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, staged: bool
) -> Tensor:
    """staged: whether another device copies to or from it, which page-locked memory of
    the host is for."""
    pinned = staged and device.type == "cpu" and torch.accelerator.is_available()
    return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device.type == device.type:
        return tensor
    return _empty(tensor.shape, tensor.dtype, device, True).copy_(tensor)


class Part(NamedTuple):
    """A tensor among bytes: where it starts, and how it lies there."""

    start: int
    end: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    spec: Spec


class Packing:
    """How the tensors of a value lie in `bytes` bytes, one after the other.

    Each keeps its strides, unless they leave gaps. Dimensions that only repeat (stride
    0) are there once.
    """

    def __init__(self, specs: Specs) -> None:
        self.parts: list[Part] = []
        self.bytes = 0
        for spec in specs:
            shape = tuple(
                1 if stride == 0 and size > 1 else size
                for size, stride in zip(spec.shape, spec.stride, strict=True)
            )
            stride = spec.stride
            if not _is_dense(shape, stride):
                stride = tuple(torch.empty(shape, device="meta").stride())
            size = spec._replace(shape=shape).bytes
            self.parts.append(Part(self.bytes, self.bytes + size, shape, stride, spec))
            self.bytes += -(-size // ALIGNMENT) * ALIGNMENT

    def views(self, memory: Tensor) -> list[Tensor]:
        """The tensors that lie in memory, a uint8 tensor of at least `bytes`."""
        return [
            memory[part.start : part.end]
            .view(part.spec.dtype)
            .as_strided(part.shape, part.stride)
            for part in self.parts
        ]

    def write(self, views: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Copies tensors to where they should lie."""
        for view, part, tensor in zip(views, self.parts, tensors, strict=True):
            if part.shape != part.spec.shape:
                for dim, size in enumerate(part.shape):
                    tensor = tensor.narrow(dim, 0, size)
            if view.numel():  # a credit of the CPU doesn't make the device wait
                view.copy_(tensor)

    def read(self, views: Sequence[Tensor]) -> list[Tensor]:
        """The tensors as they were sent, of the same memory where it can be."""
        tensors = []
        for view, (_, _, shape, stride, spec) in zip(views, self.parts, strict=True):
            tensor = view.to(spec.device) if spec.bytes else spec.empty()
            if shape != spec.shape:
                tensor = tensor.expand(spec.shape)
            elif stride != spec.stride and not _overlaps(spec):
                tensor = spec.empty().copy_(tensor)
            tensors.append(tensor)
        return tensors


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor fills its memory, each place once."""
    step = 1
    for width, size in sorted(zip(stride, shape, strict=True)):
        if size != 1:
            if width != step:
                return False
            step *= size
    return True


def _overlaps(spec: Spec) -> bool:
    """Whether several indices name one place in memory, so that it can't be filled."""
    reach = sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True))
    return 0 not in spec.shape and reach + 1 < spec.bytes // spec.dtype.itemsize


@lru_cache(maxsize=4096)
def packing_of(specs: Specs) -> Packing:
    """The packing of a value; parcels of every microbatch share it."""
    return Packing(specs)
