"""Loading: all ranks check everything before any of them changes the model."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..backend import Backend
from ..jobs.job import PlanError
from .coordinator import Coordinator
from .folders import last_whole, path_of
from .reading import Reading
from .saving import wait_for_last


def load(
    folder: str | PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    backend: Backend | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Loads a checkpoint, under any schedule, number of workers and transport.

    folder: the FOLDER of save, to load its last checkpoint, or one checkpoint, such as
        FOLDER/000001. Every rank must call load, before the model's first call or
        later. Each rank reads the weights and state that it keeps.
    model, optimizer, backend: as for save. Without optimizer, the optimizer's state
        isn't loaded. For a model built in deferred(), weights and optimizer state are
        read at the model's first call; leave the checkpoint in place until then.
    extra: objects with load_state_dict(), by the names that save got.

    Returns the other values that save got in extra=, by name. The random generators of
    torch, Python and NumPy are restored. If as many ranks load as saved, each rank gets
    its own generators back. Otherwise all ranks get those of rank 0, whose random
    numbers a step uses if the ranks' generators differ.

    Names, shapes and types of all tensors, and sizes and checksums of files, are
    checked before anything is changed. Raises PlanError on every rank if one rank finds
    a mistake.

    Load only from folders whose writers you trust. Checksums detect damage, not
    attacks: torch.distributed.checkpoint stores each rank's list of tensors as a pickle
    (.metadata), which can run code when it is read. All other files are JSON, or read
    by torch.load(weights_only=True).
    """
    wait_for_last()
    coordinator, path = Coordinator("load", backend), path_of("load", folder)
    name = coordinator.first(
        "find a checkpoint", lambda: str(last_whole(path).relative_to(path))
    )
    reading = coordinator.local(
        "read the checkpoint",
        lambda: Reading.of(path / name, model, optimizer, extra or {}, coordinator),
    )
    checksums = coordinator.each("read the checkpoint", lambda: reading.manifest.crc32)
    if len(set(checksums)) > 1:
        raise PlanError(
            f"load: ranks read different checkpoints in {path / name}; give a folder "
            "on a disk that all ranks see"
        )
    rest = coordinator.local("load its part", reading.take)
    if backend is not None:
        backend.forget()
    return rest
