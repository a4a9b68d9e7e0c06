"""Loading: all is checked, on all ranks, before anything of the model is changed."""

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
    """Loads what save wrote: under any schedule, number of workers and transport.

    folder: FOLDER, for its last checkpoint, or one such as FOLDER/000001. Every rank
        calls it, before the model's first call or later, and reads what it keeps.
    model, optimizer, backend: as for save; without optimizer, its state is left. A
        model built in deferred() is read, and its optimizer's state, at its first call,
        until which the checkpoint stays.
    extra: what has load_state_dict(), by the names it was saved by.

    Gives what else there was in extra=, by name. Torch's, Python's and NumPy's random
    generators are set as they were: on as many ranks as saved, each rank's own, else
    rank 0's, which are those that a step draws from where they differ.

    Names, shapes and types of all tensors, and sizes and checksums of files, are
    checked before anything is changed. Raises PlanError on every rank, where one finds
    that they aren't what they should be.

    What is trusted: whoever may write to the folder. Checksums find damage, not
    malice; torch.distributed.checkpoint keeps each rank's list of tensors as a pickle
    (.metadata), which can run code as it is read. All else is JSON, or read by
    torch.load(weights_only=True).
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
