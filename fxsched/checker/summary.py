"""What the checks of programs tell each other, or raise."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..ir.graphs import Specs


class CheckError(AssertionError):
    """The error for a program that must not run: a fault in a pass, ours or yours."""


class End(NamedTuple):
    """One end of a message.

    what: "send", "recv" or "fetch". other: the worker at the other end. task: whose
    node it is. position: of the task among the program's, for a send. value: the symbol
    of what is sent; None of a recv. specs: its shapes. On threads both ends have the
    same memory: stays, whether nothing goes over it at this end; last, of a send,
    whether this worker neither reads it after that nor sends it to another.
    """

    what: str
    tag: int
    other: int
    task: str
    position: int
    value: Any
    specs: Specs
    stays: bool = True
    last: bool = True


class Claim(NamedTuple):
    """A value that a program has, and which it should be.

    what: "0F1 reads a_0, which is", for people. actual, wanted: symbols, maybe open.
    """

    what: str
    actual: Any
    wanted: Any


@dataclass
class Summary:
    """What the check of all programs needs to know of one.

    fault: what is wrong with the program by itself.
    tasks: in their order.
    circle: two of them that wait for each other.
    ends: its sends and receives, in their order.
    waits: (task, tag) of each message that a task reads; tasks by position.
    claims: those that other programs decide.
    stays: reads of received weights that another update need not wait for: the tag, and
        what reads them. Their memory must stay as it is.
    left: the buffers that its jobs leave, by group.
    stages: the digests of the stages that its jobs call, by name.
    """

    rank: int
    fault: str | None = None
    tasks: list[str] = field(default_factory=list)
    circle: tuple[str, str] | None = None
    ends: list[End] = field(default_factory=list)
    waits: list[tuple[int, int]] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    stays: list[tuple[int, str]] = field(default_factory=list)
    left: dict[int, Any] = field(default_factory=dict)
    stages: dict[str, bytes] = field(default_factory=dict)
