"""A step of all workers as plain lines, before each worker's program is written.

A line is one thing that one worker does: a job, with all that belongs to it, or a piece
of what is done besides. A message is one line of both its workers, so that their
programs, which keep the order of lines, cannot wait for each other. Lines are small: a
step may have hundreds of thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx

from ..clock.event_loop import Jobs
from ..jobs import Job
from . import ops
from .graphs import Spec, Specs


class Made(NamedTuple):
    """A value that a job makes: its node in the graph of stages, and the microbatch."""

    node: fx.Node
    microbatch: int

    def __str__(self) -> str:
        return f"{self.node.name}_{self.microbatch}"


class Running(NamedTuple):
    """What a worker's jobs leave of a group: the sum of its "gradients", or the
    "buffers" that they wrote."""

    what: str
    group: int
    worker: int

    def __str__(self) -> str:
        return f"{self.what}_{self.group} of worker {self.worker}"


class Credit(NamedTuple):
    """What a job gives that makes room for a capped F."""

    job: Job

    def __str__(self) -> str:
        return f"credit_{self.job}"


@dataclass(eq=False, slots=True)
class Line:
    """One thing that a worker does; as a value, what it gives.

    target: what it calls; None for a job.
    args: values of any kind, and constants.
    fetched: the messages that bring a job's weights, by group.
    """

    worker: int
    task: str
    n: int
    target: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    specs: Specs = ()
    name: str | None = None
    group: int | None = None
    job: Job | None = None
    fetched: dict[int, Message] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name or self.task}  # worker {self.worker}, n {self.n}"


@dataclass(eq=False, slots=True)
class Message:
    """A value on its way: a send of one worker and a recv of another.

    value: what is sent; a placeholder, if it is weights.
    task, n: what the send and the recv belong to; weights are asked for by a job, and
        sent by a task of their own.
    """

    tag: int
    source: int
    to: int
    value: Value
    task: str
    n: int

    def __str__(self) -> str:
        value = self.value.name if isinstance(self.value, Line) else self.value
        return (
            f"message {self.tag}: {value} from worker {self.source} to worker {self.to}"
        )

    @property
    def fetches(self) -> bool:
        """Whether it brings weights."""
        return isinstance(self.value, fx.Node)


Value = Made | Running | Credit | Line | fx.Node
VALUES = (Made, Running, Credit, Line, fx.Node)
TOKEN = Spec((0,), (1,), torch.float32, torch.device("cpu"))


class Recipe(NamedTuple):
    """The nodes of one kind of job: those just before the call, the call, and those
    after it."""

    before: tuple[fx.Node, ...]
    call: fx.Node
    after: tuple[fx.Node, ...]

    @property
    def nodes(self) -> Iterator[fx.Node]:
        yield from self.before
        yield self.call
        yield from self.after


@dataclass(frozen=True)
class Layout:
    """What jobs are made of, and where they run.

    recipes: of each kind of jobs.kinds.
    maker: the kind of job that makes each value.
    parts: nodes that give part of a Running, with what it is and the group.
    """

    jobs: Jobs
    recipes: tuple[Recipe, ...]
    maker: dict[fx.Node, int]
    parts: dict[fx.Node, tuple[str, int]]

    @cached_property
    def _samples(self) -> dict[tuple[str, int], fx.Node]:
        """A node that gives part of each group's gradients and buffers."""
        return {part: node for node, part in self.parts.items()}

    def worker(self, value: Made | Running | Line) -> int:
        """The worker that has a value first."""
        if isinstance(value, Made):
            width = len(self.jobs.kinds)
            return self.jobs.compute[value.microbatch * width + self.maker[value.node]]
        return value.worker

    def recipe(self, job: Job) -> Recipe:
        """The nodes that a job's line stands for."""
        return self.recipes[self.jobs.at[job.stage, job.direction]]

    def specs(self, value: Value) -> tuple[Specs, bool]:
        """The shapes of a value, and whether it is a bundle of tensors."""
        if isinstance(value, Credit):
            return (TOKEN,), False
        if isinstance(value, Line):
            return value.specs, value.target in ops.BUNDLES
        if isinstance(value, Running):
            return self._samples[value.what, value.group].meta["specs"], True
        if isinstance(value, Made):
            meta = value.node.meta
            return meta["specs"], meta.get("bundle", False)
        return value.meta["specs"], True


def values_in(args: Any) -> Iterator[Any]:
    """The values among arguments, in order."""
    if isinstance(args, VALUES):
        yield args
    elif isinstance(args, dict):
        for each in args.values():
            yield from values_in(each)
    elif isinstance(args, (tuple, list)):
        for each in args:
            yield from values_in(each)


def with_values(args: Any, new: Callable[[Any], Any]) -> Any:
    """Arguments with something else in the place of each value."""
    if isinstance(args, VALUES):
        return new(args)
    if isinstance(args, dict):
        return {key: with_values(each, new) for key, each in args.items()}
    if isinstance(args, (tuple, list)):
        return type(args)(with_values(each, new) for each in args)
    return args
