"""What a plan is made of besides the schedule's answers, as text that is equal in any
process; whatever could differ without being seen in it is refused.
"""

from __future__ import annotations

import enum
import hashlib
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..ir.modes import trace_modes
from ..ir.request import Request
from .names import CannotKeep
from .recorded_callbacks import settings

SPACES = {"aten", "prims", "prim"}  # of operations that only releases change
PACKAGES = {"torch", "operator", "_operator", "math", "builtins", "fxsched", "passes"}
HIGHER_ORDER = {  # operations whose functions are graphs beside them
    *("autograd_function_apply", "checkpoint", "cond", "flex_attention", "map"),
    *("scan", "tag_activation_checkpoint", "while_loop", "wrap"),
    *("wrap_activation_checkpoint", "wrap_with_autocast", "wrap_with_set_grad_enabled"),
}
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
PLAIN = (str, int, float, complex, bool, type(None), type(...), range, torch.Size)
TYPES = (torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum)
DESCRIBED = "name", "capability"  # what torch tells of an accelerator
TENSORS = (Tensor, nn.Parameter, nn.Buffer)


def plan_key(
    gm: fx.GraphModule, args: Sequence[Any], request: Request, more: Sequence[Any]
) -> str:
    """Of Dynamo's graph, what it is called with, and the request.

    more: other plain values that the plan depends on.
    Raises CannotKeep for a graph with functions or tensors of the user's own.
    """
    text = hashlib.sha256()
    call = gm.meta["text"], repr(gm.meta["call"])
    for part in (*call, *_installed(), *trace_modes()):
        text.update(f"{_checked(part)}\n".encode())
    for field in fields(request):
        value = getattr(request, field.name)
        value = settings(value) if field.name == "schedule" else value
        text.update(f"{field.name} {_checked(repr(value))}\n".encode())
    for line in (*_graph_lines(gm), *_argument_lines(args), *map(repr, more)):
        text.update(f"{_checked(line)}\n".encode())
    return text.hexdigest()


def _checked(line: str) -> str:
    if found := ADDRESS.search(line):
        raise CannotKeep(f"an object of this process: {line[: found.end()][-80:]}")
    return line


@cache
def _installed() -> tuple[str, ...]:
    """The code that plans: fxsched's, and the versions of what it stands on."""
    code = hashlib.sha256()
    package = Path(__file__).parents[1]
    folders = package, (package / "passes").resolve()
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            code.update(file.read_bytes())
    module = torch.get_device_module()
    told = [getattr(module, f"get_device_{what}", str) for what in DESCRIBED]
    count = range(torch.accelerator.device_count())
    devices = [f"{[tell(i) for tell in told]}" for i in count]
    capability = torch.backends.cpu.get_cpu_capability()
    versions = sys.version, platform.machine(), torch.__version__, capability
    return (code.hexdigest(), str(torch.version.git_version), *versions, *devices)


def _argument_lines(args: Sequence[Any]) -> Iterator[str]:
    """The shapes of what the graph is called with, and which share memory."""
    memory: dict[int, int] = {}
    for value in args:
        if not isinstance(value, Tensor):
            yield repr(_plain(value))
            continue
        if type(value) not in TENSORS or value.layout is not torch.strided:
            raise CannotKeep(f"a tensor of the class {type(value).__name__}")
        held = value.untyped_storage()
        shared = memory.setdefault(held._cdata, len(memory)) if held.nbytes() else ""
        yield (
            f"{type(value).__name__} {tuple(value.shape)} {value.stride()} "
            f"{value.storage_offset()} {value.dtype} {value.device} {shared} "
            f"{value.requires_grad} {value.is_leaf} {value.is_conj()} {value.is_neg()}"
        )


def _graph_lines(gm: fx.GraphModule) -> Iterator[str]:
    """The nodes of a graph, what they call, and where they come from."""
    if "_checkpoint_context_fn" in gm.meta:
        raise CannotKeep("a policy of torch.utils.checkpoint")
    for node in gm.graph.nodes:
        target = node.target
        if node.op in ("get_attr", "call_module"):
            inner: Any = gm
            for part in str(target).split("."):
                inner = getattr(inner, part)
            if not isinstance(inner, fx.GraphModule):
                raise CannotKeep(f"a {type(inner).__name__} in the graph")
            yield from _graph_lines(inner)
        called = _name(target) if callable(target) else target
        yield f"{node.name} {node.op} {called} {_text(node.args)} {_text(node.kwargs)}"
        for key in ("example_value", "val"):
            yield from (_example(each) for each in _leaves(node.meta.get(key)))
        known = ("module", "stack_trace", "recompute", "arguments", "origin", "custom")
        yield repr([node.meta.get(key) for key in known])


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _example(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = type(value).__name__
        shape, stride = tuple(value.shape), value.stride()
        return (
            f"{kind} {shape} {stride} {value.storage_offset()} {value.dtype} "
            f"{value.device} {value.requires_grad}"
        )
    return f"{type(value).__name__} {value}"


def _text(value: Any) -> str:
    """An argument of a node."""
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(map(_text, value))})"
    if isinstance(value, dict):
        items = (f"{_text(key)}: {_text(each)}" for key, each in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, slice):
        return f"slice{_text((value.start, value.stop, value.step))}"
    if callable(value) and not isinstance(value, (torch.dtype, enum.Enum)):
        return _name(value)
    return repr(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, (*PLAIN, *TYPES, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    raise CannotKeep(f"a value of the class {type(value).__name__}")


def _name(target: Any) -> str:
    """A function's name, if its code comes with a release."""
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace not in SPACES:
            raise CannotKeep(f"the operation {target}")
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        if str(target) not in HIGHER_ORDER:
            raise CannotKeep(f"the operation {target}")
        return f"higher order {target}"
    owner = getattr(target, "__objclass__", None)  # of methods of types
    module = getattr(owner or target, "__module__", None) or "torch"
    name = f"{module}.{getattr(owner, '__name__', '')}.{_qualified(target)}"
    if module.split(".")[0] not in PACKAGES or "<" in name:
        raise CannotKeep(f"the function {name}")
    return name


def _qualified(target: Any) -> str:
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if name is None:
        raise CannotKeep(f"a function of the class {type(target).__name__}")
    return str(name)
