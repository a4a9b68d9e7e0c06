"""Saves and loads a model's weights alone, in files of common formats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from ..backend import Backend
from ..jobs.job import PlanError
from ..params.cut_weights import put
from ..params.full_state import module_of, plain_name
from ..params.lazy import load_later, unmade
from ..params.record import record_of
from ..params.released import is_given_up
from .content import MODEL, ModelContent
from .coordinator import Coordinator
from .cut_weights import Whole
from .fit import check_alike, check_names, tied_here
from .folders import path_of, refuse_file, replace_file, sync_folder
from .weight_files import INDEX, NAME, SUFFIX, Stored, stored_in, write_safetensors


def save_weights(
    folder: str | PathLike[str], model: nn.Module, backend: Backend | None = None
) -> None:
    """Writes a model's parameters and buffers as safetensors, by their plain names.

    folder: a new or empty folder on a disk that all ranks see. Every rank must call
        save_weights, and writes the tensors that it owns, as transformers does:
        FOLDER/model-00001-of-00002.safetensors and so on, and
        model.safetensors.index.json. If only one rank owns tensors, or there is one
        process, the file is model.safetensors. Tied weights are written under each of
        their names.
    model, backend: as for save.

    Raises OSError on a rank that could not write, and PlanError on all others.
    """
    coordinator = Coordinator("save_weights", backend)
    path = path_of("save_weights", folder)
    every = module_of(model).parameters()
    whole = coordinator.local(
        "put its weights together", lambda: Whole.of(coordinator, every)
    )
    tensors = coordinator.local(
        "list its weights", lambda: _owned(path, model, coordinator.rank, whole)
    )
    names = coordinator.each("list its weights", lambda: list(tensors))
    writers = [rank for rank, its in enumerate(names) if its] or [0]
    files = {
        rank: f"{NAME}-{i + 1:05}-of-{len(writers):05}{SUFFIX}"
        if writers[1:]
        else f"{NAME}{SUFFIX}"
        for i, rank in enumerate(writers)
    }

    def write() -> int:
        refuse_file("save_weights", path)
        path.mkdir(parents=True, exist_ok=True)
        if coordinator.rank in files:
            write_safetensors(path / files[coordinator.rank], tensors)
        return sum(tensor.nbytes for tensor in tensors.values())

    sizes = coordinator.each("write its weights", write)
    if writers[1:]:
        file_of = {name: files[rank] for rank in writers for name in names[rank]}
        head = {"total_size": sum(sizes)}
        index = json.dumps({"metadata": head, "weight_map": file_of}, indent=1)
        coordinator.first("write the index", lambda: replace_file(path / INDEX, index))
    coordinator.first("write to the disk", lambda: sync_folder(path))


def _owned(
    folder: Path, model: nn.Module, rank: int, whole: Whole
) -> dict[str, Tensor]:
    """The tensors that this rank writes, by their plain names."""
    there = sorted(folder.glob(f"*{SUFFIX}*")) if folder.exists() else []
    if there:
        raise PlanError(
            f"save_weights: {there[0]} exists already, and fxsched can't replace the "
            "several files of a model in one step; give a new folder"
        )
    content = ModelContent.of(model)
    if content.extra:
        name = next(iter(content.extra)).removeprefix(MODEL)
        raise PlanError(
            f"save_weights: the model has {name}, from get_extra_state(), which "
            "safetensors can't hold; use fxsched.save"
        )
    names = {n: n for n in content.tensors} | content.tied
    mine = {n: t for n, t in content.tensors.items() if record_of(t).source == rank}
    return {
        name.removeprefix(MODEL): whole.values.get(mine[first], mine[first])
        for name, first in names.items()
        if first in mine
    }


def load_weights(
    path: str | PathLike[str], model: nn.Module, backend: Backend | None = None
) -> None:
    """Loads a model's parameters and buffers by their plain names.

    path: a .safetensors file; an .index.json of several files; a folder with either, as
        save_weights and transformers write it; or a file that torch.save wrote of a
        state_dict(). Every rank must call load_weights, before the model's first call
        or later, and reads the tensors that it keeps. A model built in deferred() reads
        them at its first call; leave the files in place until then. Tied weights may be
        in the file under one name or more.
    model, backend: as for save.

    Names, shapes and types are checked first. Raises PlanError on every rank if one
    rank finds that they aren't the model's. Pickles are only read by
    torch.load(weights_only=True).
    """
    coordinator, file = Coordinator("load_weights", backend), Path(path)
    fitting = coordinator.local(
        "read the weights", lambda: _fitting(stored_in(file), model)
    )

    def take() -> None:
        with torch.no_grad():
            for stored, tensor in fitting:
                if lazy := unmade(tensor):
                    load_later(tensor, lazy, stored.read)
                elif parts := record_of(tensor).parts:
                    put(parts, stored.read())
                else:
                    tensor.copy_(stored.read())

    coordinator.local("load its weights", take)


def _fitting(
    stored: Mapping[str, Stored], model: nn.Module
) -> list[tuple[Stored, Tensor]]:
    """What a rank reads, and the tensors to read it into."""
    content = ModelContent.of(model)
    found = {MODEL + plain_name(name): each for name, each in stored.items()}
    for name, first in content.tied.items():
        _check_tied(name, first, found)
        if first not in found and name in found:
            found[first] = found[name]
        if first in found:
            found.setdefault(name, found[first])
    check_names("tensor", [*content.tensors, *content.tied, *content.extra], found)
    fitting = []
    for name, tensor in content.tensors.items():
        check_alike(name, found[name].what, tensor)
        if not is_given_up(tensor) or record_of(tensor).parts:
            fitting.append((found[name], tensor))
    return fitting


def _check_tied(name: str, first: str, found: Mapping[str, Stored]) -> None:
    """Raises PlanError for two tensors in a file that are one in the model."""
    if name not in found or first not in found:
        return
    if not torch.equal(found[name].read(), found[first].read()):
        raise tied_here(name, first)
