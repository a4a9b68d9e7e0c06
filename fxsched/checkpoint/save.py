"""Saving: each rank writes what it owns; then FOLDER/latest names the checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Literal, overload

from torch import nn
from torch.optim import Optimizer

from ..backend import Backend
from ..jobs.job import PlanError
from ..params.full_state import module_of
from .coordinator import Coordinator
from .cut_weights import Whole
from .folders import make_fresh, path_of, point_to, remove_older, sync_folder
from .manifest import File, Manifest
from .part import Part, Written, folder_of
from .saving import Saving, start, wait_for_last
from .values import COMMON, write_values


@overload
def save(
    folder: str | PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    backend: Backend | None = None,
    extra: Mapping[str, Any] | None = None,
    background: Literal[False] = False,
    keep: int | None = None,
) -> Path: ...


@overload
def save(
    folder: str | PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    backend: Backend | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    background: Literal[True],
    keep: int | None = None,
) -> Saving: ...


def save(
    folder: str | PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    backend: Backend | None = None,
    extra: Mapping[str, Any] | None = None,
    background: bool = False,
    keep: int | None = None,
) -> Path | Saving:
    """Saves a training state; returns the new checkpoint, FOLDER/000001 or later.

    folder: a folder on a disk that all ranks see. Every rank must call save between two
        steps. Each rank writes the tensors that it owns, by
        torch.distributed.checkpoint, under the names of plain PyTorch. Then
        FOLDER/latest names the new checkpoint. Until then, and if the save fails, it
        names the checkpoint before.
    model: the model, compiled or not. optimizer: the optimizer of its parameters.
    backend: the backend that the model is compiled with. It determines whether there
        are ranks, and how long to wait for them. Without backend, there are ranks if
        there is a process group of several.
    extra: any other state, by name: objects with state_dict(), such as learning-rate
        schedulers, GradScaler and StatefulDataLoader; numbers, strings and tensors; and
        containers of these. The state of each rank's random generators (torch, Python
        and NumPy) is always saved.
    background: whether to copy the state to CPU memory and return while a thread writes
        the files. Returns a Saving, whose wait() returns the checkpoint. The next save
        or load waits for the thread.
    keep: how many checkpoints to keep in FOLDER, including the new one. Older ones are
        removed once the new one is complete. None: all.

    Raises OSError on a rank that could not write, and PlanError on all others. Raises
    PlanError for a state that could not be loaded again. See load
    about folders that you should not trust.
    """
    if keep is not None and (type(keep) is not int or keep < 1):
        raise PlanError(
            f"save(keep={keep!r}): give a number from 1 on, or None for all"
        )
    wait_for_last()
    coordinator, path = Coordinator("save", backend), path_of("save", folder)
    fresh = path / coordinator.first("make a folder", lambda: make_fresh(path))

    def part() -> Part:
        return Part.of(model, optimizer, extra, coordinator.rank, whole)

    with _removed_if_it_fails(coordinator, fresh):
        tensors = module_of(model).parameters()
        whole = coordinator.local(
            "put its weights together",
            lambda: Whole.of(coordinator, tensors, optimizer),
        )

    if not background:
        return _write(coordinator, fresh, part, keep)
    with _removed_if_it_fails(coordinator, fresh):
        copied = coordinator.local("copy its part", lambda: part().copied())
        apart = Coordinator("save", backend, "background")
    return start(fresh, lambda: _write(apart, fresh, lambda: copied, keep))


def _write(
    coordinator: Coordinator, fresh: Path, part: Callable[[], Part], keep: int | None
) -> Path:
    """Writes this rank's part; the checkpoint, once it is whole."""
    with _removed_if_it_fails(coordinator, fresh):
        parts = coordinator.each("write its part", lambda: part().write(fresh))
    coordinator.first("finish the checkpoint", lambda: _finish(fresh, parts))
    if keep is not None and coordinator.rank == 0:
        remove_older(fresh.parent, fresh.name, keep)
    return fresh


@contextmanager
def _removed_if_it_fails(coordinator: Coordinator, fresh: Path) -> Iterator[None]:
    """Where all ranks fail alike, so that none needs its folder any longer."""
    try:
        yield
    except BaseException:
        shutil.rmtree(fresh / folder_of(coordinator.rank), ignore_errors=True)
        if coordinator.rank == 0:
            shutil.rmtree(fresh, ignore_errors=True)
        raise


def _finish(fresh: Path, parts: Sequence[Written]) -> None:
    """Makes the parts of all ranks one checkpoint, and the last."""
    try:
        _check_parts(fresh, parts)
        states = {name: its for part in parts for name, its in part.states.items()}
        write_values(fresh / COMMON, parts[0].common | {"states": states})
        files = {name: file for part in parts for name, file in part.files.items()}
        Manifest(
            workers=len(parts),
            tensors={name: its for part in parts for name, its in part.tensors.items()},
            tied=parts[0].tied,
            files=files | {COMMON: File.of(fresh / COMMON)},
            apart=tuple(
                name
                for name, number in parts[0].prints.items()
                if any(part.prints[name] != number for part in parts)
            ),
        ).write(fresh)
        sync_folder(fresh)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    point_to(fresh.parent, fresh.name)


def _check_parts(fresh: Path, parts: Sequence[Written]) -> None:
    """Raises PlanError unless they are of one state, and all of it, on one disk."""
    written = {name for part in parts for name in part.tensors}
    for rank, part in enumerate(parts):
        if part.names != parts[0].names or list(part.prints) != list(parts[0].prints):
            raise PlanError(
                f"save: rank {rank} saves another model, optimizer or extra= than rank "
                "0; give every rank the same"
            )
        for name, file in part.files.items():
            path = fresh / name
            if not path.is_file() or path.stat().st_size != file.bytes:
                raise PlanError(
                    f"save: rank 0 doesn't see {path}, which rank {rank} has written; "
                    "give a folder on a disk that all ranks see"
                )
    missing = [name for name in parts[0].model_names if name not in written]
    assert not missing, f"some rank has each tensor's newest values: {missing}"
