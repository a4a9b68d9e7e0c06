"""The arguments of a call and the tensors in them, as the user names them."""

from __future__ import annotations

import inspect
import re
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from inspect import Parameter
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

DEPTH = 20  # of objects in objects that are looked through
STATE = (nn.Module, ModuleType, FunctionType, type, str)
Dims = Mapping[str | int, int | None]


class Argument(NamedTuple):
    """A tensor in the arguments of a call, or an argument.

    name: x, batch['x'], batch.labels; args[0] for one of *args.
    position: of the argument that it is or is inside of; None for keywords.
    """

    name: str
    position: int | None = None

    def key(self, dims: Mapping[str | int, Any]) -> str | int | None:
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
    return _call(list(_arguments(code, variables)), _signature(code, variables))


def read_signature(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Call:
    """The same of a function and what it is called with, as its signature names it."""
    signature = inspect.signature(function)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    top: list[tuple[Argument, Any]] = []
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is Parameter.VAR_POSITIONAL:
            at = len(top)
            top += [(Argument(f"{name}[{i}]", at + i), v) for i, v in enumerate(value)]
        elif kind is Parameter.VAR_KEYWORD:
            top += [(Argument(each), v) for each, v in value.items()]
        else:
            position = None if kind is Parameter.KEYWORD_ONLY else len(top)
            top.append((Argument(name, position), value))
    return _call(top, list(signature.parameters))


def _call(top: Sequence[tuple[Argument, Any]], parameters: Sequence[str]) -> Call:
    seen: set[int] = set()
    tensors = [
        (Argument(name, each.position), tensor)
        for each, value in top
        for name, tensor in _tensors(value, each.name, seen)
    ]
    names = [each.name for each, _ in (*top, *tensors)] + list(parameters)
    positions = [each.position for each, _ in top if each.position is not None]
    return Call(tuple(tensors), tuple(dict.fromkeys(names)), len(positions))


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


def _arguments(
    code: CodeType, variables: Mapping[str, Any]
) -> Iterator[tuple[Argument, Any]]:
    """The arguments, without a method's `self`."""
    owner = owner_of(code, variables)
    names = iter(code.co_varnames)
    position = -1 if owner else 0
    for _ in range(code.co_argcount):
        name = next(names)
        if name != owner:
            yield Argument(name, position), variables.get(name)
        position += 1
    for _ in range(code.co_kwonlyargcount):
        name = next(names)
        yield Argument(name), variables.get(name)
    if code.co_flags & inspect.CO_VARARGS:
        name = next(names)
        for i, value in enumerate(variables.get(name, ())):
            yield Argument(f"{name}[{i}]", position + i), value
    if code.co_flags & inspect.CO_VARKEYWORDS:
        for name, value in variables.get(next(names), {}).items():
            yield Argument(name), value


def _signature(code: CodeType, variables: Mapping[str, Any]) -> list[str]:
    """The parameters that a model's forward has under its decorators."""
    owner = owner_of(code, variables)
    forward = getattr(type(variables.get(owner)), "forward", None) if owner else None
    return list(inspect.signature(forward).parameters)[1:] if forward else []


def _tensors(
    value: Any, name: str, seen: set[int], depth: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """The tensors in an argument; what is in a module is state."""
    if isinstance(value, Tensor):
        yield name, value
    elif not isinstance(value, STATE) and id(value) not in seen and depth < DEPTH:
        seen.add(id(value))
        for end, each in inside(value):
            yield from _tensors(each, name + end, seen, depth + 1)


def inside(value: Any) -> Iterator[tuple[str, Any]]:
    """What a container or object holds, and how to write it."""
    if is_dataclass(value):
        yield from ((f".{f.name}", getattr(value, f.name, None)) for f in fields(value))
    elif isinstance(value, (dict, UserDict)):
        yield from ((f"[{key!r}]", each) for key, each in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f".{key}", getattr(value, key)) for key in value._fields)
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{i}]", each) for i, each in enumerate(value))
    else:
        yield from ((f".{k}", v) for k, v in getattr(value, "__dict__", {}).items())
