"""Tensors by name, to and from a folder; alone knows torch.distributed.checkpoint.

Each rank's folder is a checkpoint of DCP's own, without its collectives, whose waits
fxsched could not end or explain. DCP reads a pickle there, .metadata, and gets nothing
but tensors, for it would unpickle anything else as it stands.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

NO_RANKS = "torch.distributed is disabled, unavailable"  # it is to be one process


def write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes them, up to the disk. Raises OSError."""
    writer = FileSystemWriter(folder)
    with _own_errors(), _without_warnings():
        save(dict(tensors), storage_writer=writer, no_dist=True)


def read_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Reads them into the place of those given, which have these names there."""
    reader = FileSystemReader(folder)
    with _own_errors(), _without_warnings():
        load(dict(tensors), storage_reader=reader, no_dist=True)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Hides DCP's warning; warnings.catch_warnings is not for threads, and saves may
    run in one."""
    known = list(warnings.filters)
    warnings.filterwarnings("ignore", NO_RANKS)
    added = warnings.filters[0]
    try:
        yield
    finally:
        if added not in known:
            with suppress(ValueError):  # another save has
                warnings.filters.remove(added)  # type: ignore[attr-defined]


@contextmanager
def _own_errors() -> Iterator[None]:
    """What went wrong instead of DCP's report of it, which is no Exception."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None
