"""Values in containers and objects, noted by ids, to see later what has changed."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import BuiltinFunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from .caller import STATE
from .structure import PLAIN, Structure

ATOMS = (Tensor, *STATE, *PLAIN, MethodType, BuiltinFunctionType)
COMPILED = "_compile_kwargs"  # of modules: Lightning's copy of compile()'s arguments
DEPTH = 6  # of objects in objects


class Change(NamedTuple):
    """Something that is no longer what it was. holder: of it, under `key`."""

    path: str
    old: Any
    new: Any
    holder: Any
    key: Any

    def __str__(self) -> str:
        return f"{self.path} was {_short(self.old)} and is {_short(self.new)}"

    def holds_traced(self) -> bool:
        """Whether it is now a value that exists only while a model is traced."""
        traced = (FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool)
        return any(isinstance(each, traced) for each in Structure(self.new).tensors)

    def undo(self) -> None:
        """Puts back what it was."""
        self._put(self.old, self.new)

    def redo(self) -> None:
        """Puts what it became."""
        self._put(self.new, self.old)

    def _put(self, value: Any, instead: Any) -> None:
        if not isinstance(self.holder, (dict, list)):
            return
        if value is MISSING:
            del self.holder[self.key]
        elif isinstance(self.holder, list) and instead is MISSING:
            self.holder.insert(self.key, value)
        else:
            self.holder[self.key] = value


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING: Any = _Missing()


class _Entry:
    """Values in one container, which are compared at once by their ids.

    keys: of a mapping; those that it lacks too. None for lists, tuples and sets.
    """

    def __init__(
        self, path: str, holder: Any, keys: Sequence[Any] | None, whole: bool
    ) -> None:
        self.path, self.holder, self.keys, self.whole = path, holder, keys, whole
        self.values = self.now()
        self.ids = tuple(map(id, self.values))

    def now(self) -> list[Any]:
        if self.keys is None:
            return list(self.holder)
        return [self.holder.get(key, MISSING) for key in self.keys]

    def same(self) -> bool:
        return tuple(map(id, self.now())) == self.ids and (
            not self.whole or len(self.holder) == len(self.ids)
        )

    def changes(self) -> Iterator[Change]:
        old = dict(enumerate(self.values))
        new = dict(enumerate(self.now()))
        keys = dict(enumerate(self.keys or range(max(len(old), len(new)))))
        if self.whole and self.keys is not None:
            added = [key for key in self.holder if key not in self.keys]
            for i, key in enumerate(added, len(keys)):
                keys[i], new[i] = key, self.holder[key]
        for i, key in keys.items():
            a, b = old.get(i, MISSING), new.get(i, MISSING)
            if not _same(a, b):
                yield Change(_member(self.path, key), a, b, self.holder, key)


class Noted:
    """Values that were noted."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self._empty: list[_Entry] = []
        self._holders: list[Any] = []  # of these, for one look at all
        self._seen: set[int] = set()

    def changes(self) -> list[Change]:
        """What is no longer what it was."""
        filled = self._empty if any(self._holders) else []
        return [
            change
            for entry in (*self.entries, *filled)
            if not entry.same()
            for change in entry.changes()
        ]

    def path_of(self, value: object) -> str | None:
        """How a value that was noted is written."""
        for entry in self.entries:
            names = range(len(entry.values)) if entry.keys is None else entry.keys
            for key, each in zip(names, entry.values, strict=True):
                if each is value:
                    return _member(entry.path, key)
        return None

    def note(
        self,
        path: str,
        holder: Any,
        keys: Sequence[Any] | None,
        whole: bool,
        depth: int = 0,
    ) -> None:
        """Notes the values of a container, and what hangs on them.

        keys: of a mapping, which it may lack; None for lists, tuples and sets.
        whole: whether what is added is a change too.
        """
        if not whole and not keys:
            return
        entry = _Entry(path, holder, keys, whole)
        if whole and not entry.ids:  # most are: a module's hooks
            self._empty.append(entry)
            self._holders.append(holder)
            return
        self.entries.append(entry)
        names = range(len(entry.values)) if keys is None else keys
        for key, value in zip(names, entry.values, strict=True):
            if depth < DEPTH and value is not MISSING and key != COMPILED:
                self._inside(_member(path, key), value, depth + 1)

    def _inside(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, ATOMS) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, Mapping):
            self.note(path, value, list(value), True, depth)
        elif isinstance(value, (list, tuple, set, frozenset)):
            self.note(path, value, None, True, depth)
        values = getattr(value, "__dict__", None)
        if isinstance(values, dict) and not inspect.isroutine(value):
            self.note(path, values, list(values), True, depth)


def _same(a: Any, b: Any, depth: int = 0) -> bool:
    """Whether two values are one, or hold the same."""
    if a is b or type(a) is not type(b) or depth > DEPTH:
        return a is b
    if isinstance(a, PLAIN):
        return bool(a == b)
    if isinstance(a, weakref.ref):
        return a() is b()
    if isinstance(a, dict):
        a, b = [*a, *a.values()], [*b, *b.values()]
    if not isinstance(a, (list, tuple)) or len(a) != len(b):
        return False
    return all(_same(x, y, depth + 1) for x, y in zip(a, b, strict=True))


def _short(value: object) -> str:
    text = repr(value).split("\n")[0]
    return text if len(text) < 60 else f"{text[:56]} .."


def _member(path: str, key: object) -> str:
    for own in ("_parameters", "_buffers", "_modules"):
        path = path.removesuffix(f".{own}")
    return f"{path}.{key}" if isinstance(key, str) else f"{path}[{key!r}]"
