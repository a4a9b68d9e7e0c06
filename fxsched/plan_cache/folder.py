"""Plans of earlier starts, as files in a folder of the user's own."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..jobs.schedule import Schedule
from .graph_files import CannotKeep, unpacked
from .recorded_callbacks import CallbackRecord, answering

PLACE = "FXSCHED_CACHE"  # names the folder; empty for none
LARGEST = 1 << 30  # bytes of all plans; the ones not used for longest go first
DIGEST = 32  # bytes


def folder() -> Path | None:
    """Where plans are kept: $FXSCHED_CACHE, or fxsched in the user's caches; None where
    that is empty."""
    place = os.environ.get(PLACE)
    if place is not None:
        return Path(place) if place else None
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "fxsched"


def kept_plan(place: Path, key: str, schedule: Schedule) -> Any:
    """What was kept under a key, for a schedule that answers as the one that it was
    made for; None if there is nothing.

    Raises CannotKeep for a folder that others may write into: what is read can run any
    code.
    """
    for file in sorted(place.glob(f"{key}-*.plan")):
        _check_owner(place)
        _check_owner(file)
        content = file.read_bytes()
        digest, data = content[:DIGEST], content[DIGEST:]
        if hashlib.sha256(data).digest() != digest:
            continue  # cut short
        questions, rest = pickle.loads(data)
        functions = answering(schedule, questions)
        if functions is not None:
            found = unpacked(rest, functions)
            with contextlib.suppress(OSError):
                os.utime(file)
            return found
    return None


def keep(place: Path, key: str, asked: CallbackRecord, data: bytes) -> None:
    """Keeps what was made of what a key stands for and of these answers, packed.

    Raises CannotKeep where others may write, and OSError.
    """
    data = pickle.dumps((asked.questions, data), pickle.HIGHEST_PROTOCOL)
    answers = hashlib.sha256(pickle.dumps(asked.questions)).hexdigest()[:16]
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(place)
    file = place / f"{key}-{answers}.plan"
    new = place / f"{file.name}.{os.urandom(8).hex()}"  # ranks write at the same time
    try:
        new.write_bytes(hashlib.sha256(data).digest() + data)
        new.chmod(0o600)
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)
    _make_room(place)


def _check_owner(path: Path) -> None:
    state = path.stat()
    if state.st_uid != os.getuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CannotKeep(f"{path} belongs to others, or they may write it")


def _make_room(place: Path) -> None:
    """Deletes the plans that were not used for longest, from LARGEST on."""
    files = sorted(_files(place), key=lambda file: -file[1].st_mtime)
    total = 0
    for file, state in files:
        total += state.st_size
        if total > LARGEST:
            file.unlink(missing_ok=True)


def _files(place: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for file in place.glob("*.plan"):
        with contextlib.suppress(OSError):
            yield file, file.stat()
