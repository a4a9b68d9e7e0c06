"""What a function in a user's file returns: `path/to/model.py:make`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import textwrap
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ..jobs.job import PlanError


def returned(text: str) -> tuple[Any, str, str]:
    """What `path/to/model.py:make` or `package.module:make` returns when called, the
    function's name, and its file. `path/to/model.py` alone has `make` called.

    Raises PlanError, in one line, if there is no such file or function, or if either
    fails.
    """
    where, _, name = (f"{text}:make" if text.endswith(".py") else text).rpartition(":")
    if not where or not name:
        raise PlanError(f"{text!r}: give path/to/model.py:make or package.module:make")
    module = _module(where)
    file = str(getattr(module, "__file__", where))
    make = getattr(module, name, None)
    if not callable(make):
        names = _functions(module)
        near = difflib.get_close_matches(name, names, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        write = f"write {where}:NAME for another function"
        said = f"(it has {', '.join(names)}); {write}" if names else "(it has none)"
        raise PlanError(f"{where} has no function {name!r} {said}{hint}")
    if not (inspect.isroutine(make) or inspect.isclass(make)):
        kind = type(make).__name__
        raise PlanError(
            f"{text}: {name} is of class {kind}; name a function that returns it, as "
            f"def make(): return {name}"
        )
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise PlanError(
            f"{text}: fxsched calls {name}() without arguments: {error}; name a "
            "function that needs none"
        ) from error
    with blamed(file, f"{name}() raised"):
        return make(), name, file


def _module(where: str) -> ModuleType:
    """The module of a path or of a dotted name, imported as Python would a script."""
    is_path = where.endswith(".py") or "/" in where or "\\" in where
    path = Path(where).resolve()
    folder = str(path.parent if is_path else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if not is_path:
        return _dotted(where)
    if not path.is_file():
        raise PlanError(
            f"there is no file {where!r}; give path/to/model.py:make{_nearby(path)}"
        )
    spec = importlib.util.spec_from_file_location(_free_name(path.stem), path)
    if spec is None or spec.loader is None:
        raise PlanError(f"{where!r} is not a Python file; give path/to/model.py:make")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pickle, dataclasses and Dynamo look it up here
    with blamed(str(path), "importing it raised"):
        spec.loader.exec_module(module)
    return module


def _dotted(where: str) -> ModuleType:
    try:
        spec = importlib.util.find_spec(where)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin:
        raise PlanError(
            f"there is no module {where!r} here, nor a Python file {where!r}; give "
            "path/to/model.py:make or package.module:make"
        )
    with blamed(spec.origin, "importing it raised"):
        return importlib.import_module(where)


def _free_name(stem: str) -> str:
    """A name for a user's module that shadows nobody's."""
    while stem in sys.modules or stem in sys.stdlib_module_names:
        stem += "_"
    return stem


def _nearby(path: Path) -> str:
    if not path.parent.is_dir():
        return f": there is no folder {str(path.parent)!r}"
    files = sorted(p.name for p in path.parent.glob("*.py"))
    stems = [name.removesuffix(".py") for name in files]
    if near := difflib.get_close_matches(path.stem, stems, 1):
        return f"; did you mean {near[0]}.py?"
    return f"; its folder has {', '.join(files[:8])}" if files else ""


def _functions(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]


@contextmanager
def blamed(file: str, what: str) -> Iterator[None]:
    """Says what the user's code raised in one line, with the file and the line."""
    try:
        yield
    except PlanError:
        raise
    except (Exception, SystemExit) as error:
        place = _place(error, file) or file
        raise PlanError(f"{place}: {what} {_said(error)}") from error


def _said(error: BaseException) -> str:
    """The kind of an error and what it says, in one line that is not too long."""
    kind, text = type(error).__name__, str(error)
    if isinstance(error, SyntaxError):
        text = error.msg
    return f"{kind}: {textwrap.shorten(text, 400, placeholder=' ..')}".rstrip(": ")


def _place(error: BaseException, file: str) -> str | None:
    """The last line of the user's file that an error went through."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    places = [
        f"{frame.filename}:{frame.lineno}" for frame in frames if frame.filename == file
    ]
    return places[-1] if places else None
