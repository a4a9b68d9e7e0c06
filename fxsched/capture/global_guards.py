"""What a model's Python reads outside of the model: globals, closures, classes.

Of each code that runs while a model is traced, the values of its names are noted as it
starts: what has changed when the trace ends was written by the model itself, and what
changes later is another trace. Values of installed packages are noted where they are
plain, and not if they change while tracing: caches, and what is said once.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from ..ir.garbage import referrers
from .caller import PLAIN
from .graph_breaks import foreign, installed
from .noted_values import DEPTH, Noted, closure

MINE = re.compile(r"fxsched\.(?!models\.)")
LONG = 1000  # entries of a container that are not looked at


class GlobalGuards(Noted):
    """Those that were noted.

    modules: that the model calls and doesn't hold, by how it names them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.modules: dict[str, nn.Module] = {}
        self._installed = Noted()
        self._known: dict[int, tuple[Any, set[str]]] = {}

    def look(self, frame: FrameType) -> None:
        """Notes what a code may read, of which this is the first frame."""
        code, scope = frame.f_code, frame.f_globals
        path, names, file = str(scope.get("__name__")), code.co_names, code.co_filename
        if file.startswith("<"):  # as dataclasses' methods
            file = str(scope.get("__file__") or "")
        if foreign(file) or path not in sys.modules or MINE.match(path):
            return
        if installed(file):
            plain = [n for n in names if isinstance(scope.get(n, self), PLAIN)]
            self._installed.note(path, scope, plain)
            return
        self._names(path, scope, scope, names)
        caller = frame.f_back
        if code.co_freevars and caller and code not in caller.f_code.co_consts:
            for function in _functions(code):
                free = [*names, *code.co_freevars]
                path, cells = function.__qualname__, closure(function)
                self._names(path, function, cells, free)

    def settle(self) -> None:
        """Ends the trace: forgets of installed packages what it has changed."""
        self.entries += [e for e in self._installed.entries if not [*e.changes()]]
        self._installed, self._known = Noted(), {}

    def _names(
        self,
        path: str,
        owner: Any,
        values: Mapping[str, Any],
        names: Sequence[str],
        depth: int = 0,
    ) -> None:
        """Notes names in a scope, and what they have of the same names."""
        _, known = self._known.setdefault(id(owner), (owner, set()))
        holder = owner if isinstance(owner, FunctionType) else values
        here = [name for name in names if name in values]
        new = [name for name in here if name not in known]
        self.note(path, holder, new)
        known.update(here)
        for name in here:
            value = values[name]
            if isinstance(value, nn.Module):
                self.modules.setdefault(f"{path}.{name}", value)
            elif depth < DEPTH and _has_names(value):
                self._names(f"{path}.{name}", value, vars(value), names, depth + 1)

    def _inside(self, path: str, value: Any, depth: int) -> None:
        sized = isinstance(value, (Mapping, Sequence, set, frozenset))
        own = not hasattr(value, "__dict__") or not _other(type(value))
        if own and not (sized and len(value) > LONG):
            super()._inside(path, value, depth)


@contextmanager
def first_frames(look: Callable[[FrameType], None]) -> Iterator[None]:
    """Shows the first frame of each code that runs in this thread."""
    seen: dict[int, CodeType] = {}
    before = sys.gettrace()

    def call(frame: FrameType, event: Any, argument: Any) -> Any:
        code = frame.f_code
        if id(code) not in seen:
            seen[id(code)] = code
            look(frame)
        return None if before is None else before(frame, event, argument)

    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)


def _functions(code: CodeType) -> list[FunctionType]:
    """Those of a code that have a closure."""
    found = referrers(code)
    return [f for f in found if isinstance(f, FunctionType) and f.__closure__]


def _has_names(value: Any) -> bool:
    """Whether a model's code reads what an object, class or module has by its name."""
    if isinstance(value, (Tensor, FunctionType)) or inspect.isroutine(value):
        return False
    if isinstance(value, (type, ModuleType)):
        return not _other(value)
    return isinstance(getattr(value, "__dict__", None), dict)


def _other(value: type | ModuleType) -> bool:
    """Whether a class or module is of torch, Python's library or a package."""
    name = value.__module__ if isinstance(value, type) else value.__name__
    file = str(getattr(sys.modules.get(name), "__file__", None) or "")
    return not file or foreign(file) or installed(file)
