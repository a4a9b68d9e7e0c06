"""What a run needs of the device that its tensors are on: a clock and a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

Clock = Callable[[], Any]


def device_of(values: Iterable[object]) -> torch.device | None:
    """The first device but the CPU that tensors are on, also in tuples; None if there
    is none."""
    for value in values:
        found = device_of(value) if isinstance(value, tuple) else None
        if isinstance(value, Tensor) and value.device.type not in ("cpu", "meta"):
            found = value.device
        if found is not None:
            return found
    return None


def present_stream(
    device: torch.device | None,
) -> Callable[[], AbstractContextManager[object]]:
    """A context in which another thread launches to this thread's present stream."""
    if device is None:
        return nullcontext
    module: Any = torch.get_device_module(device)
    stream = module.current_stream(device)
    return lambda: module.stream(stream)


class DeviceClock:
    """When a device comes to what is launched: marks of its present stream, which are
    times of time.perf_counter() once `seconds` has waited for them."""

    def __init__(self, device: torch.device) -> None:
        self.module: Any = torch.get_device_module(device)
        self.device = device  # which may not be the present one
        self.module.synchronize(device)
        self.first = self()
        self.first.synchronize()
        self.began = time.perf_counter()

    def __call__(self) -> Any:
        """A mark of what is launched so far."""
        mark = self.module.Event(enable_timing=True)
        mark.record(self.module.current_stream(self.device))
        return mark

    def seconds(self, mark: Any) -> float:
        """When the device came to a mark, or the time that has been asked before."""
        if isinstance(mark, float):
            return mark
        mark.synchronize()
        return self.began + float(self.first.elapsed_time(mark)) / 1e3
