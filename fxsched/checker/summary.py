"""What the checks of programs tell each other, or raise."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ..ir.graphs import Specs
from ..jobs.job import Job
from .check_averages import Averaged, Part
from .check_joint import JobPart, JointUse
from .check_order import Sum
from .check_updates import Weights, WeightUse


class CheckError(AssertionError):
    """A program that must not run: a fault in a pass, fxsched's own or the user's."""


class Provenance(NamedTuple):
    """What a value that leaves a program was made from.

    specs: its shapes.
    forwards: the tag of the message that it came with, if it is handed on as it is.
    maker: the job whose result it is a part of, if any.
    microbatches, received: those that it was made from: of this worker's jobs and rows,
        and of the messages with these tags.
    adds: the jobs whose gradients it adds up; None if it is no such sum.
    added: tags of messages that it adds up as well.
    parts: results of jobs here that it was made from, as often, if some jobs are joint.
    weights: which ones, if it is weights that this worker keeps.
    part: a replica of weights, or an average, if it is one.
    total: in which order it adds up gradients, where that is to be proved.
    """

    specs: Specs
    forwards: int | None
    maker: Job | None
    microbatches: tuple[int, ...]
    received: tuple[int, ...]
    adds: tuple[Job, ...] | None
    added: tuple[int, ...]
    parts: tuple[JobPart, ...]
    weights: Weights | None
    part: Part | None
    total: Sum = None


class End(NamedTuple):
    """One end of a message.

    what: "send", "recv" or "fetch". other: the worker at the other end. task: whose
    node it is. position: of the task among the program's, for a send. origin: of what
    is sent, a position in Summary.origins. specs: what is received.
    """

    what: str
    tag: int
    other: int
    task: str
    position: int
    origin: int
    specs: Specs


class Use(NamedTuple):
    """A job that reads a received value: the value's name, its message, and, if it is
    what an earlier job keeps for this one, that job."""

    job: Job
    name: str
    tag: int
    maker: Job | None


@dataclass
class Summary:
    """What the check of all programs needs to know of one.

    fault: what is wrong with the program by itself.
    tasks: in their order.
    circle: two of them that wait for each other.
    ends: its sends and receives, in their order.
    waits: (task, tag) of each message that a task reads; tasks by position.
    uses: received values that jobs read.
    origins: of what it sends and returns.
    gradients: for each group, the jobs that give a gradient of it here.
    returns: the origin of the gradient of each group that it keeps.
    updates: jobs U here, with the group and the origin of its gradient.
    weight_uses: weights that came with messages.
    every: for how many microbatches an update is. alone: whether it is with the
        worker's own gradients.
    in_order: whether gradients are added in the order of microbatches.
    averaged: averages of replicas that it makes, or takes.
    joint_uses: what jobs read, if there are joint jobs. microbatches: how many.
    unread: a gradient then that nothing reads, if there is one.
    """

    rank: int
    fault: str | None = None
    tasks: list[str] = field(default_factory=list)
    circle: tuple[str, str] | None = None
    ends: list[End] = field(default_factory=list)
    waits: list[tuple[int, int]] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    origins: list[Provenance] = field(default_factory=list)
    gradients: dict[int, list[Job]] = field(default_factory=dict)
    returns: dict[int, int] = field(default_factory=dict)
    updates: list[tuple[Job, int, int]] = field(default_factory=list)
    weight_uses: list[WeightUse] = field(default_factory=list)
    every: int | None = None
    alone: bool = False
    in_order: bool = False
    averaged: list[Averaged] = field(default_factory=list)
    joint_uses: list[JointUse] = field(default_factory=list)
    microbatches: int = 1
    unread: str | None = None
