"""Plans of earlier starts, as files in a folder of the user's own."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..jobs.schedule import Schedule
from .graph_files import packed, unpacked
from .names import CannotKeep
from .recorded_callbacks import CallbackRecord, answering

PLACE = "FXSCHED_CACHE"  # names the folder; empty for none
LARGEST = 1 << 30  # bytes of all plans; the ones not used for longest go first


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

    Raises CannotKeep for a folder that others may write into, and for what fxsched
    didn't write.
    """
    for file in sorted(place.glob(f"{key}-*.plan")):
        _check_owner(place)
        _check_owner(file)
        digest, _, text = file.read_text("utf-8").partition("\n")
        if _digest(text) != digest:
            continue  # cut short
        questions, _, rest = text.partition("\n")
        functions = answering(schedule, unpacked(questions, {}))
        if functions is not None:
            found = unpacked(rest, functions)
            with contextlib.suppress(OSError):
                os.utime(file)
            return found
    return None


def keep(place: Path, key: str, asked: CallbackRecord, made: str) -> None:
    """Keeps what was made of what a key stands for and of these answers, packed.

    Raises CannotKeep where others may write, and OSError.
    """
    questions = packed(asked.questions)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(place)
    file = place / f"{key}-{_digest(questions)[:16]}.plan"
    new = place / f"{file.name}.{os.urandom(8).hex()}"  # ranks write at the same time
    text = f"{questions}\n{made}"
    try:
        new.touch(0o600)
        new.write_text(f"{_digest(text)}\n{text}", "utf-8")
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)
    _make_room(place)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


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
