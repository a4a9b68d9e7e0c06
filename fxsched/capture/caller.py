"""The arguments of a call and the tensors in them, as the user names them."""

from __future__ import annotations

import copy
import inspect
import re
from collections import UserDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from inspect import Parameter, signature
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

DEPTH = 20  # of objects in objects that are looked through
PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
TRACED = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
STATE = (nn.Module, ModuleType, FunctionType, type, str)
Dims = Mapping[str | int, int | None]
EMPTY: tuple[Any, ...] = (list, tuple, dict, set)


class Argument(NamedTuple):
    """A tensor in the arguments of a call, or an argument.

    name: x, batch['x'], batch.labels; args[0] for one of *args.
    position: of the argument that it is or is inside of; None for keywords.
    """

    name: str
    position: int | None = None

    def key(self, dims: Dims) -> str | int | None:
        """The key that is nearest to it, of those that name it or what it is in."""
        path = parts(self.name)
        names = [k for k in dims if isinstance(k, str)]
        names = [k for k in names if path[: len(parts(k))] == parts(k)]
        if names:
            return max(names, key=lambda k: len(parts(k)))
        return self.position if self.position in dims else None


class Call(NamedTuple):
    """tensors: those in the arguments. names: everything that the caller may name."""

    tensors: tuple[tuple[Argument, Tensor], ...]
    names: tuple[str, ...]
    positions: int


def parts(name: str) -> list[str]:
    """batch['x'] as ["batch", "x"]."""
    return re.findall(r"\w+", name)


def read_call(code: CodeType, variables: Mapping[str, Any]) -> Call:
    """What a function is called with: its code, and the variables of its frame."""
    owner = owner_of(code, variables)
    cells = tuple(CellType() for _ in code.co_freevars)
    own = dict(signature(FunctionType(code, {}, closure=cells)).parameters)
    own.pop(owner or "", None)
    # the parameters that a model's forward has under its decorators
    forward = getattr(type(variables[owner]), "forward", None) if owner else None
    under = list(signature(forward).parameters)[1:] if forward else []
    return _call(own, variables, under)


def read_signature(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Call:
    """The same of a function and what it is called with, as its signature names it."""
    bound = signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    parameters = bound.signature.parameters
    return _call(parameters, bound.arguments, list(parameters))


def _call(
    parameters: Mapping[str, Parameter], values: Mapping[str, Any], more: Sequence[str]
) -> Call:
    top = list(_arguments(parameters, values))
    seen: set[int] = set()
    tensors = [
        (Argument(name, each.position), leaf)
        for each, value in top
        for name, leaf in leaves(value, each.name, seen)
        if isinstance(leaf, Tensor)
    ]
    names = dict.fromkeys([*(each.name for each, _ in (*top, *tensors)), *more])
    positions = [each.position for each, _ in top if each.position is not None]
    return Call(tuple(tensors), tuple(names), len(positions))


def _arguments(
    parameters: Mapping[str, Parameter], values: Mapping[str, Any]
) -> Iterator[tuple[Argument, Any]]:
    position = 0
    for name, parameter in parameters.items():
        value = values.get(name)
        if parameter.kind is Parameter.VAR_POSITIONAL:
            for i, each in enumerate(value or ()):
                yield Argument(f"{name}[{i}]", position + i), each
        elif parameter.kind is Parameter.VAR_KEYWORD:
            yield from ((Argument(key), each) for key, each in (value or {}).items())
        elif parameter.kind is Parameter.KEYWORD_ONLY:
            yield Argument(name), value
        else:
            yield Argument(name, position), value
            position += 1


def owner_of(code: CodeType, variables: Mapping[str, Any]) -> str | None:
    """The name of a method's `self`, if the code is of a method."""
    first = code.co_varnames[:1] if code.co_argcount else ()
    if not first or first[0] not in variables:
        return None
    kind = type(variables[first[0]])
    for name in (code.co_name, "forward", "__call__"):
        method = inspect.getattr_static(kind, name, None)
        while method is not None and not isinstance(method, staticmethod):
            if getattr(method, "__code__", None) is code:
                return first[0]
            method = getattr(method, "__wrapped__", None)
    return None


def leaves(
    value: Any, name: str = "", seen: set[int] | None = None, depth: int = 0
) -> Iterator[tuple[str, Any]]:
    """What is in containers and objects, and how to write it after the value's name;
    what is in a module is state."""
    seen = set() if seen is None else seen
    whole = isinstance(value, (*TRACED, *PLAIN, *STATE)) or depth == DEPTH
    parts = [] if whole else list(inside(value))
    if not parts:
        yield name, value
    elif id(value) not in seen:
        seen.add(id(value))
        for end, each in parts:
            yield from leaves(each, name + end, seen, depth + 1)


def inside(value: Any) -> Iterator[tuple[str, Any]]:
    """What a container or object holds, and how to write it."""
    fields = is_dataclass(value) or hasattr(value, "_fields")
    if isinstance(value, (dict, UserDict)) and not fields:
        yield from ((f"[{key!r}]", each) for key, each in value.items())
    elif isinstance(value, (list, tuple, deque)) and not fields:
        yield from ((f"[{i}]", each) for i, each in enumerate(value))
    else:
        names = [*getattr(value, "_fields", ()), *getattr(value, "__dict__", ())]
        for kind in type(value).__mro__:
            own = getattr(kind, "__slots__", ())
            names += [own] if isinstance(own, str) else own
        for name in dict.fromkeys(names):
            if not name.startswith("__"):
                yield f".{name}", getattr(value, name, None)


class Structure:
    """A value, taken apart.

    names: of the tensors in it, each once, by where it was found first.
    tensors: these tensors.
    key: equal for values that differ in their tensors alone.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.names: list[str] = []
        self.tensors: list[Any] = []
        self._atoms: list[Any] = []  # that no copy has its own of
        numbers: dict[int, int] = {}
        key: list[Hashable] = []
        for name, leaf in leaves(value):
            if isinstance(leaf, TRACED):
                if id(leaf) not in numbers:
                    numbers[id(leaf)] = len(numbers)
                    self.names.append(name)
                    self.tensors.append(leaf)
                key.append((name, numbers[id(leaf)]))
            elif isinstance(leaf, PLAIN):
                key.append((name, type(leaf), leaf))
            elif isinstance(leaf, EMPTY) and not leaf:
                key.append((name, type(leaf)))
            else:
                key.append((name, id(leaf)))
                self._atoms.append(leaf)
        self.key = tuple(key)

    def with_tensors(self, tensors: Sequence[Any]) -> Any:
        """A copy of the value with others in the place of its tensors."""
        memo: dict[int, Any] = {id(each): each for each in self._atoms}
        memo.update(zip(map(id, self.tensors), tensors, strict=True))
        return copy.deepcopy(self.value, memo)

    def without_tensors(self) -> Structure:
        """The same, of which only the structure is wanted."""
        result = copy.copy(self)
        result.tensors = [object() for _ in self.tensors]
        result.value = self.with_tensors(result.tensors)
        return result
