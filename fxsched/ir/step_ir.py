"""A step of all workers as plain lines, before each worker's program is written.

A line is one thing that one worker does: a job, with all that belongs to it, or a piece
of what is done besides. A message is one line of both its workers, so that their
programs, which keep the order of lines, cannot wait for each other. Lines are small,
as a step may have hundreds of thousands, and do not change once they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx

from ..clock.jobs import NO_JOBS, Jobs, Kind
from ..clock.timeline import Timeline
from ..jobs.job import Direction, Job
from . import ops
from .facts import Facts, facts
from .graphs import Spec, Specs


class Made(NamedTuple):
    """A value that a job makes: its node in the graph of stages, and the microbatch."""

    node: fx.Node
    microbatch: int

    def __str__(self) -> str:
        return f"{self.node.name}_{self.microbatch}"


class Running(NamedTuple):
    """What a worker's jobs leave of a group: the sum of its "gradients", or the
    "buffers" that they wrote.

    round: of gradients, how many updates come before the one that they are for.
    """

    what: str
    group: int
    worker: int
    round: int = 0

    def __str__(self) -> str:
        later = f", round {self.round}" if self.round else ""
        return f"{self.what}_{self.group} of worker {self.worker}{later}"


class Credit(NamedTuple):
    """What a job gives that makes room for a capped F."""

    job: Job

    def __str__(self) -> str:
        return f"credit_{self.job}"


@dataclass(eq=False, slots=True)
class Line:
    """One thing that a worker does; as a value, what it gives.

    target: what it calls; None for F, B and W.
    job: the job that it is; of an update of several groups, the first of their lines.
    args: values of any kind, and constants.
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

    def __str__(self) -> str:
        return f"{self.name or self.task}  # worker {self.worker}, n {self.n}"


@dataclass(eq=False, slots=True)
class Message:
    """A value on its way: a send of one worker and a recv of another.

    value: what is sent; of weights, a placeholder or the line that updated them.
    task, n: what the send and the recv belong to; weights are asked for by a job, and
        sent by a task of their own.
    fetches: whether it brings weights.
    """

    tag: int
    source: int
    to: int
    value: Value
    task: str
    n: int
    fetches: bool = False

    def __str__(self) -> str:
        value = self.value.name if isinstance(self.value, Line) else self.value
        return (
            f"message {self.tag}: {value} from worker {self.source} to worker {self.to}"
        )


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
        """All nodes, in order."""
        yield from self.before
        yield self.call
        yield from self.after


NEVER = Timeline(NO_JOBS, (), (), ())


@dataclass(frozen=True)
class StepIR:
    """A step of all workers; each pass over it fills in more.

    graph: the graph of stages, with a call for each kind of job.
    timeline: when each job should run. Its jobs have their workers and n.
    credits: the B (or W) that each capped F waits for.
    recipes: what a job of each kind of jobs.kinds is made of.
    lines: of all workers, in the global order.
    running: the last line on its worker that adds to a sum, or writes buffers, in the
        order of these lines.
    results: what each worker returns, in values.
    fetched: the messages that bring the weights of a line, by group.
    every: how many microbatches an update is for; None if there are none.
    updated: the weights that jobs read after an update, by group, by how many updates
        came before, and by the worker that keeps them.
    copies: by group and job, what a job reads of a version in whose place a newer one
        may be by then.
    renewed: for each line that copies new weights, where it gets them: the worker, and
        what made them there.
    totals: sums of gradients in the order of microbatches, by group and round, where
        request.deterministic asks for them; there is no running of gradients then.
    shared: the sums over all microbatches that B of joint stages reads, by the pointers
        to them.
    narrow: the shapes, as they travel, of nodes that travel in another type.
    """

    graph: fx.GraphModule
    timeline: Timeline = NEVER
    credits: Mapping[Job, Job] = field(default_factory=dict)
    recipes: tuple[Recipe, ...] = ()
    lines: Sequence[Line | Message] = ()
    running: Mapping[Running, Line] = field(default_factory=dict)
    results: Mapping[int, dict[str, Any]] = field(default_factory=dict)
    fetched: Mapping[Line, dict[int, Message]] = field(default_factory=dict)
    every: int | None = None
    updated: Mapping[tuple[int, int, int], Line] = field(default_factory=dict)
    copies: Mapping[tuple[int, Job], Line] = field(default_factory=dict)
    renewed: Mapping[Line, tuple[int, Line | fx.Node]] = field(default_factory=dict)
    totals: Mapping[tuple[int, int], Line | Made] = field(default_factory=dict)
    shared: Mapping[fx.Node, Line] = field(default_factory=dict)
    narrow: Mapping[fx.Node, Specs] = field(default_factory=dict)

    @property
    def facts(self) -> Facts:
        """What is known of the model."""
        return facts(self.graph)

    def round(self, microbatch: int) -> int:
        """How many updates come before those that a microbatch's gradients are for."""
        return 0 if self.every is None else microbatch // self.every

    def weights(self, group: fx.Node, job: Job, worker: int) -> fx.Node | Line:
        """The weights of a group that a job reads from a worker that keeps them."""
        if not self.updated and not self.copies:
            return group
        number = group.meta["group"]
        copied = self.copies.get((number, job))
        if copied is not None:
            return copied
        return self.updated.get((number, self.version(job), worker), group)

    @property
    def weight_inputs(self) -> dict[int, fx.Node]:
        """The inputs of the graph of stages that are weights, by group."""
        nodes = self.graph.graph.find_nodes(op="placeholder")
        return {node.meta["group"]: node for node in nodes if "group" in node.meta}

    def version(self, job: Job) -> int:
        """How many updates the weights of a job have seen."""
        return self.jobs.version(self.jobs.number(job))

    @property
    def jobs(self) -> Jobs:
        """The jobs of the step, with their workers and n."""
        return self.timeline.jobs

    @property
    def late(self) -> bool:
        """Whether B runs in backward(), when all F are done."""
        return self.facts.loss is None

    @property
    def order(self) -> list[int]:
        """The numbers of all jobs, in the global order."""
        order, jobs = list(self.timeline.order), self.jobs
        if self.late:
            backward = [d is not Direction.FORWARD for _, d in jobs.kinds]
            order.sort(key=lambda i: backward[jobs.kind[i]])
        return order

    @property
    def draws(self) -> set[Kind]:
        """The kinds of jobs that draw random numbers."""
        pairs = zip(self.jobs.kinds, self.recipes, strict=False)  # updates have none
        return {kind for kind, recipe in pairs if recipe.call.meta["draw"] is not None}

    @cached_property
    def maker(self) -> dict[fx.Node, int]:
        """The kind of job that makes each value."""
        return {n: kind for kind, each in enumerate(self.recipes) for n in each.nodes}

    @cached_property
    def parts(self) -> dict[fx.Node, tuple[str, int]]:
        """Nodes that give part of a Running: what it is, and the group."""
        what = [
            "buffers" if direction is Direction.FORWARD else "gradients"
            for _, direction in self.jobs.kinds
        ]
        return {
            node: (what[kind], node.meta["group"])
            for node, kind in self.maker.items()
            if "group" in node.meta
        }

    @cached_property
    def _samples(self) -> dict[tuple[str, int], fx.Node]:
        """A node that gives part of each group's gradients and buffers."""
        return {part: node for node, part in self.parts.items()}

    def worker(self, value: Made | Running | Line) -> int:
        """The worker that has a value first."""
        if isinstance(value, Made):
            number = self.jobs.find(self.maker[value.node], value.microbatch)
            return self.jobs.worker[number]
        return value.worker

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

    def sent(self, value: Value) -> Specs:
        """The shapes of a value as it travels."""
        if isinstance(value, Made) and value.node in self.narrow:
            return self.narrow[value.node]
        return self.specs(value)[0]


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
