"""Files of weights: safetensors, which it alone knows, and plain state_dicts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..jobs.job import PlanError
from .manifest import Saved

NAME = "model"  # of the files, as transformers has it
SUFFIX = ".safetensors"
INDEX = f"{NAME}{SUFFIX}.index.json"
TYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8"},
    **{"BOOL": "bool", "C64": "complex64", "U16": "uint16", "U32": "uint32"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "U64": "uint64"},
}


class Stored(NamedTuple):
    """A tensor in a file: what it is, and how to read it, to the CPU."""

    what: Saved
    read: Callable[[], Tensor]


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes them into a new file, which is there whole or not at all.

    Raises OSError; PlanError without safetensors.
    """
    _check_installed()
    from safetensors.torch import save_file

    separate: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        shared = tensor.untyped_storage().data_ptr() in storages  # refused as it is
        separate[name] = tensor.clone() if shared else tensor
        storages.add(tensor.untyped_storage().data_ptr())
    new = path.with_name(f"{path.name}.new")
    save_file(separate, new, {"format": "pt"})
    with new.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(new, path)


def stored_in(path: Path) -> dict[str, Stored]:
    """The tensors of a file, or of a folder of safetensors, by name.

    path: as for load_weights. Raises PlanError for what is neither, or damaged.
    """
    if path.is_dir():
        whole, index = path / f"{NAME}{SUFFIX}", path / INDEX
        path = index if index.exists() else whole
    if not path.is_file():
        raise PlanError(
            f"load_weights: there is no {path}; give a file, or a folder that has "
            f"{NAME}{SUFFIX} or {INDEX}"
        )
    try:
        if path.suffix == SUFFIX:
            return _safetensors(path)
        return _indexed(path) if path.suffix == ".json" else _plain(path)
    except PlanError:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise PlanError(
            f"load_weights: {path} is damaged, or has more than weights "
            f"({type(error).__name__}: {reason}); write it again"
        ) from error


def _safetensors(path: Path) -> dict[str, Stored]:
    _check_installed()
    from safetensors import safe_open

    file: Any = safe_open(path, "pt")

    def stored(name: str) -> Stored:
        part = file.get_slice(name)
        dtype = TYPES.get(part.get_dtype(), part.get_dtype())
        what = Saved(0, dtype, tuple(part.get_shape()))
        return Stored(what, partial(file.get_tensor, name))

    return {name: stored(name) for name in file.keys()}  # noqa: SIM118


def _indexed(path: Path) -> dict[str, Stored]:
    """The tensors of the files that an index names."""
    file_of: dict[str, str] = json.loads(path.read_text())["weight_map"]
    files = {name: path.parent / name for name in sorted(set(file_of.values()))}
    for name, file in files.items():
        if Path(name).name != name or not file.is_file():
            raise PlanError(
                f"load_weights: {path} names {name!r}, which isn't in the same folder; "
                "put all files of the model there"
            )
    stored = {name: _safetensors(file) for name, file in files.items()}
    return {name: stored[file][name] for name, file in file_of.items()}


def _plain(path: Path) -> dict[str, Stored]:
    """The tensors of what torch.save wrote, mapped into memory and not copied."""
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(state, dict):
        raise PlanError(
            f"load_weights: {path} has a {type(state).__name__}; give a file with a "
            "state_dict() of the model"
        )
    wrong = [name for name, each in state.items() if not isinstance(each, Tensor)]
    if wrong:
        raise PlanError(
            f"load_weights: {path} has {wrong[0]!r}, which is no tensor; give a file "
            "with a state_dict() of the model alone"
        )
    return {
        name: Stored(Saved.of(tensor, 0), partial(state.__getitem__, name))
        for name, tensor in state.items()
    }


def _check_installed() -> None:
    try:
        import safetensors  # noqa: F401
    except ImportError as error:
        raise PlanError(
            "safetensors isn't installed; pip install safetensors, or use fxsched.save"
        ) from error
