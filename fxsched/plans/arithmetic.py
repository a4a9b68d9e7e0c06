"""What a traced model computes, as text that is equal in any process.

Ranks hold these texts against each other: the same jobs and messages do not say that
they compute the same. No line has an address, an id or the number of a device in it.
"""

from __future__ import annotations

import hashlib
import operator
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor, fx

from ..ir.graph_text import LOCAL, argument_text, constant_digest, function_name
from ..ir.graphs import Spec
from ..ir.meta import of_call
from ..ir.modes import casts
from ..ir.request import Request
from ..ir.user_line import user_line

WHERE = "  # "  # what comes after it is for people
NOT_COMPARED = ("schedule", "owners", "readers")


@dataclass(frozen=True)
class Arithmetic:
    """The options and operations of a plan.

    digest: equal if they are. passes: the user's passes. packed: a line for each option
    and operation, with the place in the user's code after WHERE.
    """

    digest: str = ""
    passes: tuple[str, ...] = ()
    packed: bytes = b""

    @property
    def lines(self) -> list[str]:
        """A line for each option and operation."""
        return zlib.decompress(self.packed).decode().split("\n")


def describe_arithmetic(
    gm: fx.GraphModule, request: Request, passes: Sequence[Callable[..., Any]]
) -> Arithmetic:
    """What a traced microbatch computes, by the user's options."""
    lines = [
        LOCAL.sub("", f"{field.name}={getattr(request, field.name)!r}")
        for field in fields(request)
        if field.name not in NOT_COMPARED
    ]
    lines += [f"autocast {kind} {dtype}" for kind, dtype in casts()]
    lines += _graph_lines(gm)
    text = hashlib.sha256()
    for line in lines:
        text.update(f"{line.split(WHERE)[0]}\n".encode())
    names = tuple(
        LOCAL.sub("", f"{function_name(each)} {_code(each)}") for each in passes
    )
    packed = zlib.compress("\n".join(lines).encode(), 1)
    return Arithmetic(text.hexdigest(), names, packed)


def first_difference(one: Arithmetic, other: Arithmetic) -> tuple[str, str]:
    """The first line of each that the other has not in its place."""
    a, b = one.lines, other.lines
    for mine, its in zip([*a, "nothing more"], [*b, "nothing more"], strict=False):
        if mine.split(WHERE)[0] != its.split(WHERE)[0]:
            return mine, its
    raise AssertionError("texts that differ have a first difference")


def _graph_lines(gm: fx.GraphModule) -> Iterator[str]:
    """A line for each node; what a graph calls inside of another comes before it."""
    number = {node: f"%{i}" for i, node in enumerate(gm.graph.nodes)}
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            yield from _attribute_lines(gm, node)
        elif node.op == "call_module":
            inner = gm.get_submodule(str(node.target))
            yield from _graph_lines(inner) if isinstance(inner, fx.GraphModule) else ()
        yield _line(node, number)


def _line(node: fx.Node, number: dict[fx.Node, str]) -> str:
    arguments = [argument_text(value, number) for value in node.args]
    arguments += [
        f"{key}={argument_text(value, number)}" for key, value in node.kwargs.items()
    ]
    if node.op == "placeholder":
        value = of_call(node).get("val")
        shape = str(Spec.of(value)) if isinstance(value, Tensor) else ""
        name = of_call(node).get("name", node.name)
        gradient = getattr(value, "requires_grad", False)
        return f"{number[node]} = input {name} {shape} {gradient}"
    target = (
        node.op if node.op in ("output", "get_attr") else function_name(node.target)
    )
    text = f"{number[node]} = {target}({', '.join(arguments)})"
    return LOCAL.sub("", text).replace("\n", " ") + _place(node)


def _place(node: fx.Node) -> str:
    """The user's line that a node comes from, if it is known."""
    line = user_line(node.meta.get("stack_trace"))
    return f"{WHERE}{Path(line.path).name}:{line.number}: {line.code}" if line else ""


def _attribute_lines(gm: fx.GraphModule, node: fx.Node) -> Iterator[str]:
    """What a graph has of its own: a constant's numbers, or a graph that it calls."""
    value = operator.attrgetter(str(node.target))(gm)
    if isinstance(value, fx.GraphModule):
        yield from _graph_lines(value)
    elif isinstance(value, Tensor):
        yield f"constant {Spec.of(value)} {constant_digest(value)}"


def _code(function: Callable[..., Any]) -> str:
    """A digest of what it runs; an object runs its class's __call__."""
    code = getattr(function, "__code__", None)
    code = code or getattr(type(function).__call__, "__code__", None)
    return "" if code is None else hashlib.sha256(code.co_code).hexdigest()[:16]
