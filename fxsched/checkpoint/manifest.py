"""What a checkpoint has: its tensors and who wrote them, its files and checksums.

A file that was cut short or has a flipped bit is found before anything in it is read.
Checksums are no signatures: who may write to the folder may write them, too.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..jobs.job import PlanError
from .folders import MANIFEST, replace_file

FORMAT = 1
CHUNK = 1 << 20  # bytes read at a time


class Saved(NamedTuple):
    """A tensor of a checkpoint; rank: whose folder has it."""

    rank: int
    dtype: str
    shape: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor, rank: int) -> Saved:
        """A tensor as that rank writes it."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Saved(rank, dtype, tuple(tensor.shape))

    def empty(self) -> Tensor:
        """A new tensor like it, its contents undefined."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype))

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


class File(NamedTuple):
    """Size and checksum (CRC-32) of a file."""

    bytes: int
    crc32: int

    @staticmethod
    def of(path: Path) -> File:
        """Those of a file on disk. Raises OSError."""
        crc, size = 0, 0
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                crc, size = zlib.crc32(chunk, crc), size + len(chunk)
        return File(size, crc)


class Manifest(NamedTuple):
    """A checkpoint's contents.

    workers: how many ranks saved it; 1 for threads.
    tensors: by name. tied: names of tensors that were another's, by name.
    files: by path in the checkpoint. apart: what of extra= ranks had other values of.
    """

    workers: int
    tensors: dict[str, Saved]
    tied: dict[str, str]
    files: dict[str, File]
    apart: tuple[str, ...]

    @property
    def crc32(self) -> int:
        """Its checksum."""
        return _crc(self._asdict())

    def write(self, folder: Path) -> None:
        """Writes it, as the last of a checkpoint's files. Raises OSError."""
        head = {"format": FORMAT, "crc32": self.crc32}
        text = json.dumps(head | self._asdict(), indent=1)
        replace_file(folder / MANIFEST, f"{text}\n")

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Reads it. Raises PlanError for what fxsched.save did not write."""
        try:
            body = json.loads((folder / MANIFEST).read_bytes())
            known, crc = body.pop("format") == FORMAT, body.pop("crc32")
            if known and crc == _crc(body):
                return _manifest(body)
        except (ValueError, KeyError, AttributeError):
            pass  # of JSON or UTF-8; said below
        raise PlanError(
            f"load: {folder / MANIFEST} is damaged, or another version of fxsched "
            f"wrote it; load an earlier checkpoint by its folder: {_others(folder)}"
        )

    def check_files(self, folder: Path, names: Iterable[str]) -> None:
        """Raises PlanError for the first that isn't as it was written."""
        for name in names:
            path, wanted = folder / name, self.files.get(name)
            try:
                found = File.of(path) if wanted is not None else None
            except OSError as error:
                raise PlanError(
                    f"load: {path} can't be read ({error.strerror}); load an earlier "
                    f"checkpoint by its folder: {_others(folder)}"
                ) from error
            if found is None or found != wanted:
                raise PlanError(
                    f"load: {path} is damaged: {_difference(found, wanted)}; load an "
                    f"earlier checkpoint by its folder: {_others(folder)}"
                )


def _difference(found: File | None, wanted: File | None) -> str:
    if found is None or wanted is None:
        return "the manifest doesn't list it"
    if found.bytes != wanted.bytes:
        return f"it has {found.bytes:,} bytes, and was written with {wanted.bytes:,}"
    return f"its checksum is {found.crc32:08x}, and was {wanted.crc32:08x}"


def _others(folder: Path) -> str:
    """Names of the whole checkpoints beside one, or that there are none."""
    whole = sorted(path.parent.name for path in folder.parent.glob(f"*/{MANIFEST}"))
    return ", ".join(name for name in whole if name != folder.name) or "there is none"


def _manifest(body: Mapping[str, Any]) -> Manifest:
    tensors = {
        name: Saved(rank, dtype, tuple(shape))
        for name, (rank, dtype, shape) in body["tensors"].items()
    }
    files = {name: File(*each) for name, each in body["files"].items()}
    return Manifest(body["workers"], tensors, body["tied"], files, tuple(body["apart"]))


def _crc(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
