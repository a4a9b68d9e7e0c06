"""Folders of checkpoints: a fresh one for each, and a pointer to the last whole one.

FOLDER/000002/..   one checkpoint, with its manifest.json written last
FOLDER/latest      "000002", replaced at once when that is whole

DCP's own writer removes an older checkpoint's metadata before the new one's is there,
so that a crash between leaves none; here nothing that is whole is ever written to.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

from ..jobs.job import PlanError
from ..jobs.user_values import shown

POINTER = "latest"
MANIFEST = "manifest.json"


def path_of(call: str, folder: object) -> Path:
    """A user's folder. Raises PlanError for what is no path."""
    if isinstance(folder, (str, PathLike)):
        return Path(folder)
    raise PlanError(
        f"{call}(folder={shown(folder)}): give a folder's path, then the model"
    )


def refuse_file(call: str, folder: Path) -> None:
    """Raises PlanError for a file where a folder belongs."""
    if folder.is_file():
        raise PlanError(f"{call}({str(folder)!r}): this is a file; give a folder")


def make_fresh(folder: Path) -> str:
    """Makes a folder for the next checkpoint; its name. Raises OSError, and PlanError
    for a file."""
    refuse_file("save", folder)
    folder.mkdir(parents=True, exist_ok=True)
    number = max(_numbers(folder), default=0) + 1
    while True:
        try:
            (folder / f"{number:06}").mkdir()
            return f"{number:06}"
        except FileExistsError:  # of another process, a moment ago
            number += 1


def _numbers(folder: Path) -> Iterator[int]:
    return (int(p.name) for p in folder.iterdir() if p.name.isdecimal())


def last_whole(folder: Path) -> Path:
    """The checkpoint that a folder's pointer names, or the folder, if it is one.

    Raises PlanError if there is none.
    """
    refuse_file("load", folder)
    if (folder / MANIFEST).is_file():
        return folder
    try:
        name = (folder / POINTER).read_text().strip()
    except FileNotFoundError:
        raise PlanError(
            f"load({str(folder)!r}): this folder has no file {POINTER!r}, which names "
            "the last checkpoint; give the folder that fxsched.save was given"
        ) from None
    except UnicodeDecodeError:
        name = ""
    if not name.isdecimal() or not (folder / name / MANIFEST).is_file():
        raise PlanError(
            f"load({str(folder)!r}): the file {POINTER!r} in this folder names no "
            "checkpoint; give a numbered folder in it that has a manifest.json"
        )
    return folder / name


def point_to(folder: Path, name: str) -> None:
    """Makes a whole checkpoint the one that is loaded: the old one is, or the new one,
    whenever the machine stops. Raises OSError."""
    sync_folder(folder)
    replace_file(folder / POINTER, f"{name}\n")


def remove_older(folder: Path, name: str, keep: int) -> None:
    """Removes checkpoints older than one, and what is left of saves that were killed,
    but for the last `keep` whole ones, that one counted."""
    older = sorted(n for n in _numbers(folder) if n < int(name))
    whole = [n for n in older if (folder / f"{n:06}" / MANIFEST).is_file()]
    kept = whole[len(whole) - (keep - 1) :] if keep > 1 else []
    for number in older:
        if number not in kept:
            gone = folder / f"{number:06}"
            (gone / MANIFEST).unlink(missing_ok=True)  # no longer whole, from now on
            shutil.rmtree(gone, ignore_errors=True)


def replace_file(path: Path, text: str) -> None:
    """Writes a file that is there whole or not at all. Raises OSError."""
    new = path.with_name(f"{path.name}.new")
    with new.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
