"""Values in containers and objects, noted by ids, to see later what has changed.

Dynamo notes each value that it reads. torch.export runs the model's own Python: here
attributes of modules are noted as they are read, and what hangs on them is compared.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from ..torch_compat.module_reads import Reads
from .caller import PLAIN, STATE, Structure

ATOMS = (Tensor, *STATE, *PLAIN, MethodType, BuiltinFunctionType)
CONTAINERS = (Mapping, list, tuple, set, frozenset)
COMPILED = "_compile_kwargs"  # of modules: Lightning's copy of compile()'s arguments
DEPTH = 6  # of objects in objects
OWN = frozenset(vars(nn.Module()))  # what torch itself keeps of a module
OF_CLASSES = (*PLAIN, list, tuple, dict, set)


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


class _Entry(NamedTuple):
    """What a container, or a function's closure, held.

    keys: of a mapping; those that it lacks too. None for all that it holds.
    """

    path: str
    holder: Any
    keys: Sequence[Any] | None
    values: Mapping[Any, Any]

    def changes(self) -> Iterator[Change]:
        old, new = self.values, _held(self.holder, self.keys)
        if old.keys() == new.keys() and all(map(is_, old.values(), new.values())):
            return
        for key in {**old, **new}:
            a, b = old.get(key, MISSING), new.get(key, MISSING)
            if not _same(a, b):
                yield Change(_member(self.path, key), a, b, self.holder, key)


class Noted:
    """Values that were noted, to see later what has changed."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self._seen: set[int] = set()

    def changes(self) -> list[Change]:
        """What is no longer what it was."""
        # most are empty: a module's hooks
        filled = (each for each in self.entries if each.values or each.holder)
        return [change for entry in filled for change in entry.changes()]

    def path_of(self, value: object) -> str | None:
        """How a value that was noted is written."""
        for entry in self.entries:
            for key, each in entry.values.items():
                if each is value:
                    return _member(entry.path, key)
        return None

    def note(
        self, path: str, holder: Any, keys: Sequence[Any] | None = None, depth: int = 0
    ) -> None:
        """Notes the values of a container, and what hangs on them.

        keys: of a mapping, which it may lack; None for all, and for what is added.
        """
        if keys is not None and not keys:
            return
        entry = _Entry(path, holder, keys, _held(holder, keys))
        self.entries.append(entry)
        for key, value in entry.values.items():
            if depth < DEPTH and value is not MISSING and key != COMPILED:
                self._inside(_member(path, key), value, depth + 1)

    def _inside(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, ATOMS) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, CONTAINERS):
            self.note(path, value, None, depth)
        values = getattr(value, "__dict__", None)
        if isinstance(values, dict) and not inspect.isroutine(value):
            self.note(path, values, None, depth)


def _held(holder: Any, keys: Sequence[Any] | None) -> Mapping[Any, Any]:
    """What a container or closure holds, by key, name or position."""
    if isinstance(holder, FunctionType):
        holder = closure(holder)
    if keys is not None:
        return {key: holder.get(key, MISSING) for key in keys}
    return dict(holder if isinstance(holder, Mapping) else enumerate(holder))


def closure(function: FunctionType) -> dict[str, Any]:
    """The values of a function's closure that there are; of a tensor, which may be
    traced, its type."""
    names, held = function.__code__.co_freevars, dict[str, Any]()
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it is empty
            value = cell.cell_contents
            held[name] = type(value) if isinstance(value, Tensor) else value
    held.pop("__class__", None)
    return held


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


def noted_model(roots: Mapping[str, nn.Module], reads: Reads | None = None) -> Noted:
    """What modules hold beside the values of their tensors.

    roots: by how the model names them. reads: names that matter; None for all.
    """
    noted = Noted()
    for root, each in roots.items():
        for name, module in each.named_modules():
            _note_module(noted, f"{root}.{name}" if name else root, module, reads)
    return noted


def _note_module(
    noted: Noted, path: str, module: nn.Module, reads: Reads | None
) -> None:
    values, names = vars(module), None
    if reads is not None:
        read = reads.get(id(module), set())
        names = sorted({*read, *(OWN & values.keys())})
        for name in names:  # plain values that a class has for its objects
            kinds = (k for k in type(module).__mro__ if name in vars(k))
            kind = None if name in values else next(kinds, None)
            if kind is not None and isinstance(vars(kind)[name], OF_CLASSES):
                noted.note(kind.__name__, vars(kind), [name], DEPTH)
    if isinstance(module, nn.RNNBase):  # it writes them as its weights change
        names = [n for n in names or values if not n.startswith("_flat_weight")]
    noted.note(path, values, names)
