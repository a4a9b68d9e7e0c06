"""Default random generators that a block may seed, and which are put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def devices_in(values: Any) -> Iterable[torch.device]:
    """The accelerators of tensors, and those that are named, anywhere in values."""
    found = dict[torch.device, None]()
    for value in tree_leaves(values):
        if isinstance(value, torch.device | Tensor):
            found[value.device if isinstance(value, Tensor) else value] = None
    return [device for device in found if device.type not in ("cpu", "meta")]


@contextmanager
def kept_generators(values: Any) -> Iterator[None]:
    """The generators of the CPU and of the devices in values are afterwards as before;
    other devices, which other ranks may use, aren't touched."""
    with ExitStack() as stack:
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        for device in devices_in(values):
            module = torch.get_device_module(device)
            at = device if device.index is None else device.index
            stack.callback(module.set_rng_state, module.get_rng_state(at), at)
        yield
