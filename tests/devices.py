"""Devices that this machine hasn't, as torch.get_device_module gives them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


class Devices:
    """A module of devices of one kind, whose generators are on the CPU."""

    def __init__(self, kind: str, count: int) -> None:
        self.kind, self.used = kind, True
        self.generators = [torch.Generator().manual_seed(i) for i in range(count)]

    def is_initialized(self) -> bool:
        return self.used

    def device_count(self) -> int:
        return len(self.generators)

    def get_rng_state(self, device: int) -> Tensor:
        return self.generators[device].get_state()

    def set_rng_state(self, state: Tensor, device: int) -> None:
        self.generators[device].set_state(state)

    def states(self) -> list[Tensor]:
        return list(map(self.get_rng_state, range(self.device_count())))

    def max_memory_allocated(self) -> int:
        return 7 * self.used

    def get_device_name(self, device: int) -> str:
        return f"the {self.kind} {device}"


def find_devices(monkeypatch: pytest.MonkeyPatch, kind: str, count: int) -> Devices:
    """Has torch find so many devices of a kind."""
    devices = Devices(kind, count)

    def current(check_available: bool = False) -> torch.device:
        return torch.device(kind)

    monkeypatch.setattr(torch, "get_device_module", lambda device=None: devices)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    monkeypatch.setattr(torch.accelerator, "device_count", devices.device_count)
    return devices
