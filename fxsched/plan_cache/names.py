"""What a plan on disk may name: operations, functions and classes, and where they are.

A file can have been written by anyone who may write to the folder. Reading it makes
data of fxsched's own classes, without a call of theirs, and graphs of what is listed
here, none of which runs code that a file brings.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

SPACES = ("aten", "prims", "prim", "fxsched")  # of operations
OPERATORS = (
    *("getitem", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg"),
    *("abs", "eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "not_"),
)
NUMBERS = ("ceil", "floor", "trunc", "sqrt")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in OPERATORS},
    **{f"math.{name}": getattr(math, name) for name in NUMBERS},
    "set_grad_enabled": torch._C._set_grad_enabled,
    "enter_autocast": _enter_autocast,
    "exit_autocast": _exit_autocast,
}
NAMES = {function: name for name, function in FUNCTIONS.items()}
OWN_FUNCTIONS = ("fxsched.ir.ops", "fxsched.ir.joint")  # files whose functions may be
ROOMS = re.compile(
    r"fxsched\.(?:(?:capture|clock|ir|jobs|partition|placement|plan_cache|plans)\.\w+|"
    r"planning|pipeline)"
)
OBJECTS = ("fxsched.placement.row_warnings.RowWatch",)  # classes that aren't data
TORCH = (torch.dtype, torch.layout, torch.memory_format)
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


class CannotKeep(Exception):
    """Says what of a plan can't be written, read or compared."""


def function_name(function: Any) -> str:
    """The name of a function; CannotKeep for one that isn't listed."""
    try:
        if function in NAMES:
            return NAMES[function]
    except TypeError:  # it has no hash
        pass
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', '')}"
    if _own(name) is not function:
        raise CannotKeep(f"the function {name}")
    return name


@cache
def function_of(name: str) -> Callable[..., Any]:
    """The function of a name."""
    found = FUNCTIONS.get(name) or _own(name)
    if found is None:
        raise CannotKeep(f"the function {name}")
    return found


def _own(name: str) -> Callable[..., Any] | None:
    home, _, last = name.rpartition(".")
    if home not in OWN_FUNCTIONS or last.startswith("_"):
        return None
    found = getattr(import_module(home), last, None)
    return found if getattr(found, "__module__", None) == home else None


@cache
def class_of(name: str) -> type:
    """The class of a name: data of fxsched's own; CannotKeep for others."""
    home, _, last = name.rpartition(".")
    if not ROOMS.fullmatch(home):
        raise CannotKeep(f"the class {name}")
    found = getattr(import_module(home), last, None)
    if not isinstance(found, type) or not (_is_data(found) or name in OBJECTS):
        raise CannotKeep(f"the class {name}")
    return found


@cache
def class_name(kind: Any) -> str:
    """The name of a class of fxsched's own data."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    if class_of(name) is not kind:
        raise CannotKeep(f"the class {name}")
    return name


def _is_data(kind: type) -> bool:
    named = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return named or is_dataclass(kind) or issubclass(kind, Enum)


def member_of(name: str, member: str) -> Enum:
    """A member of an enumeration."""
    found = class_of(name)
    if not issubclass(found, Enum):
        raise CannotKeep(f"the enumeration {name}")
    return found[member]


def operation_name(operation: torch._ops.OpOverload) -> str:
    """An operation's own name, and its overload's: aten::add.Tensor."""
    name: str = operation._schema.name
    if name.split("::")[0] not in SPACES or name.startswith("fxsched::chosen_rows"):
        raise CannotKeep(f"the operation {operation}")
    return f"{name}.{operation._overloadname}"


@cache
def operation_of(name: str) -> Callable[..., Any]:
    """The operation of a name."""
    space, _, rest = name.partition("::")
    operation, _, overload = rest.partition(".")
    if space not in SPACES:
        raise CannotKeep(f"the operation {name}")
    packet = getattr(getattr(torch.ops, space), operation)
    found = getattr(packet, overload or "default")
    if not isinstance(found, torch._ops.OpOverload):
        raise CannotKeep(f"the operation {name}")
    return found


def higher_order(name: str) -> Callable[..., Any]:
    """A higher-order operation of torch's, by its name."""
    found = getattr(torch.ops.higher_order, dotted(name), None)
    if not isinstance(found, torch._ops.HigherOrderOperator):
        raise CannotKeep(f"the operation {name}")
    return found


def check_target(target: Any) -> None:
    """Raises CannotKeep for what no node may call: all but listed operations and
    functions."""
    if not isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        function_name(target)


def torch_value(name: str) -> Any:
    """A type, layout or memory format of torch, by its name in torch."""
    found = getattr(torch, name, None)
    if not isinstance(found, TORCH):
        raise CannotKeep(f"torch.{name}")
    return found


def dotted(name: Any) -> str:
    """A name that code of a graph has as it is: words with dots between them."""
    if not (isinstance(name, str) and IDENTIFIER.fullmatch(name.replace(".", "_"))):
        raise CannotKeep(f"the name {name!r}")
    return name
