"""What pip installs: each file once, and a checkout that type checkers follow."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from .map import MODULES, PACKAGE, ROOT


def built(version: str, tmp_path: Path) -> ZipFile:
    wheel: Any = pytest.importorskip("hatchling.builders.wheel")
    builder = wheel.WheelBuilder(str(ROOT))
    return ZipFile(next(builder.build(directory=str(tmp_path), versions=[version])))


def test_a_wheel_has_each_file_once(tmp_path: Path) -> None:
    names = [
        n for n in built("standard", tmp_path).namelist() if ".dist-info/" not in n
    ]
    modules = {module.path.relative_to(ROOT).as_posix() for module in MODULES.values()}
    data = {"fxsched/py.typed", "fxsched/draw/page.html"}
    assert sorted(names) == sorted(modules | data)


def test_an_editable_install_is_a_path_that_type_checkers_follow(
    tmp_path: Path,
) -> None:
    """Not an import hook, which mypy, pyright and editors do not run."""
    wheel = built("editable", tmp_path)
    names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    (path,) = names
    assert path.endswith(".pth")
    assert os.path.samefile(wheel.read(path).decode().strip(), PACKAGE.parent)
