"""What of a checkpoint is no tensor of the model: files that torch reads weights-only.

Its reader takes tensors, numbers, words and containers of them, and runs no code.
"""

from __future__ import annotations

import io
import os
import random
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..jobs.job import PlanError
from ..jobs.user_values import shown
from ..params.full_state import mapped
from ..transport.checksums import digest

COMMON, OWN = "common.pt", "own.pt"  # of all ranks, and in the folder of each


def write_values(path: Path, values: Mapping[str, Any]) -> None:
    """Writes them, up to the disk. Raises OSError."""
    with path.open("wb") as file:
        torch.save(dict(values), file)
        file.flush()
        os.fsync(file.fileno())


def read_values(path: Path) -> dict[str, Any]:
    """Reads them, tensors on the CPU."""
    values: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return values


def states_of(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """What is saved of extra=: of what has state_dict() that, else the value itself.

    Raises PlanError for what couldn't be read again.
    """
    check_named(extra)
    states = {
        name: each.state_dict() if hasattr(each, "state_dict") else each
        for name, each in (extra or {}).items()
    }
    for name, state in states.items():
        check_readable(f"extra[{name!r}]", state)
    return states


def check_named(extra: object) -> None:
    """Raises PlanError for an extra= that names nothing."""
    if extra is not None and not isinstance(extra, Mapping):
        raise PlanError(
            f"extra={shown(extra)}: give a dict by name, as {{'scheduler': scheduler}}"
        )


def check_readable(what: str, value: Any) -> None:
    """Raises PlanError for what torch.load(weights_only=True) would refuse."""
    file = io.BytesIO()
    try:
        torch.save(mapped(value, _small), file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:
        known = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"has {known[1]}" if known else str(error).strip().split("\n")[0]
        raise PlanError(
            f"save: {what} has more than tensors, numbers, strings and containers of "
            f"these, and fxsched can load only those ({reason}); give an object whose "
            "state_dict() has only those"
        ) from error


def fingerprint(value: Any) -> int:
    """Equal for equal values, such as two ranks'."""
    return zlib.crc32(repr(mapped(value, digest)).encode())


def _small(value: Tensor) -> Any:
    return value.new_empty(0) if type(value) is Tensor else value


def random_state() -> dict[str, Any]:
    """Of the generators here: torch's of the CPU and, once they are used, of the
    accelerators, under the name of their type; Python's and NumPy's."""
    states, device = dict[str, list[Tensor]](), _accelerator()
    module = torch.get_device_module()
    if device and getattr(module, "is_initialized", lambda: False)():
        count = range(torch.accelerator.device_count())
        states[device.type] = [module.get_rng_state(i) for i in count]
    name, key, *rest = np.random.get_state(legacy=True)
    return {
        "cpu": torch.get_rng_state(),
        **states,
        "python": random.getstate(),
        "numpy": (name, np.asarray(key).tolist(), *rest),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Sets them, and those of as many accelerators of the same type as there are."""
    torch.set_rng_state(state["cpu"])
    device, module = _accelerator(), torch.get_device_module()
    states = state.get(device.type, []) if device else []
    for i, each in enumerate(states[: torch.accelerator.device_count()]):
        module.set_rng_state(each, i)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator(check_available=True)
