"""A step of all workers in SSA, before each worker's program is written.

An op is one thing that one worker does: a job, with all that belongs to it, or a piece
of what is done besides. Ops read values, each of which is made once: an update of
weights makes new ones, though in the memory of the old. A message is one line of both
its workers, so that their programs, which keep the order of lines, cannot wait for each
other. Ops are small, as a step may have hundreds of thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx

from ..clock.jobs import NO_JOBS, Jobs, Kind, sum_root
from ..clock.timeline import Timeline
from ..jobs.job import Direction, Job
from . import joint, ops
from .encodings import Codes
from .facts import Facts, facts
from .graphs import Group, Spec, Specs
from .meta import of_call


class JobOutput(NamedTuple):
    """A value that a job makes: its node in the graph of stages, and the microbatch."""

    node: fx.Node
    microbatch: int

    def __str__(self) -> str:
        return f"{self.node.name}_{self.microbatch}"


class Weights(NamedTuple):
    """A group of weights as a worker that keeps it has it when the step begins.

    node: the input of the graph of stages.
    """

    node: fx.Node
    worker: int

    def __str__(self) -> str:
        return f"{self.node.name} of worker {self.worker}"


class Stale(NamedTuple):
    """Weights that are read when newer ones may be in their place, or so many
    velocities away from them; protect_versions says what is read instead.

    group, version: which they are.
    """

    value: Weights | Op
    group: int
    version: int
    gap: float = 0.0

    def __str__(self) -> str:
        less = f" less {self.gap:g} velocities" * bool(self.gap)
        return f"stale {_name(self.value)}{less}"


class Total(NamedTuple):
    """The sum of a group's gradients; lower_sums says how it is made.

    round: how many updates come before the one that it is for.
    replica: the worker whose gradients alone are added up, if its weights are its own.
    """

    group: int
    round: int
    replica: int | None = None

    def __str__(self) -> str:
        whose = "" if self.replica is None else f" of worker {self.replica}"
        return f"gradients_{self.group} of round {self.round}{whose}"


class Credit(NamedTuple):
    """What a job gives when it is done, for what waits for that alone."""

    job: Job

    def __str__(self) -> str:
        return f"credit_{self.job}"


@dataclass(eq=False, slots=True)
class Op:
    """One thing that a worker does; as a value, what it gives.

    target: what it calls; None for F, B and W.
    args: values of any kind, and constants; of F, B and W, the weights that they read,
        and what they read of other jobs, as step.reads names it.
    group: of weights, if it makes some.
    job: the job that it is; of an update of several groups, the first of their ops.
    after: what it waits for, and does not read.
    aside: the lane beside the worker's jobs that it runs in, and holds up none of them;
        what is in one lane runs in the order of lines. 0 for among the jobs.
    seconds: that it should take, if it is no job, and takes any.
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
    after: tuple[Value, ...] = ()
    aside: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.name or self.task}  # worker {self.worker}, n {self.n}"


@dataclass(eq=False, slots=True)
class Message:
    """A value on its way: a send of one worker and a recv of another; as a value of the
    receiver, what has come.

    task, n: what the send and the recv belong to; weights are asked for by a job, and
        sent by a task of their own.
    specs: the shapes in which it travels.
    fetches: whether it brings weights.
    codes: how the value is encoded, if it travels in other shapes than its own.
    among: the workers of the all_reduce that it is a part of, in their order; () of a
        message by itself.
    """

    tag: int
    source: int
    to: int
    value: Value
    task: str
    n: int
    specs: Specs
    fetches: bool = False
    codes: Codes | None = None
    among: tuple[int, ...] = ()

    @property
    def aside(self) -> int:
        """The lane beside the sender's jobs that it is sent in; 0 for none."""
        if self.hands_on:
            return HANDS_ON
        value = self.value
        if not isinstance(value, Op) or not value.aside:
            return 0
        return value.aside if value.worker == self.source else HANDS_ON

    @property
    def hands_on(self) -> bool:
        """Whether it brings weights on that came to the sender."""
        return isinstance(self.value, Message)

    @property
    def bytes(self) -> int:
        """Bytes that travel; of an all_reduce, those of a ring: 2 (W - 1) / W times its
        own to the next of its W workers, none to others."""
        size, count = sum(spec.bytes for spec in self.specs), len(self.among)
        if not count:
            return size
        at = self.among.index
        follows = at(self.to) == (at(self.source) + 1) % count
        return 2 * (count - 1) * size // count * follows

    def __str__(self) -> str:
        value = _name(self.value)
        return (
            f"message {self.tag}: {value} from worker {self.source} to worker {self.to}"
        )


def _name(value: Value) -> str:
    return str(value.name if isinstance(value, Op) else value)


# fx.Node: an input of the graph of stages, which each worker has.
Value = JobOutput | Weights | Stale | Total | Credit | Op | Message | fx.Node
VALUES = (JobOutput, Weights, Stale, Total, Credit, Op, Message, fx.Node)
Way = tuple[int, int] | frozenset[int]  # from a worker to another; or between several
TOKEN = Spec((0,), (1,), torch.float32, torch.device("cpu"))
HANDS_ON, OFFLOADS, RELOADS = 3, 4, 5  # lanes, see Op.aside, after those of sums
SERVED = 4  # jobs before their place at which weights leave that no step changes
OVER = {ops.update: 2, ops.renew: 0}  # whose results are in the memory of this argument


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


def _read_nodes(recipe: Recipe) -> Iterator[fx.Node]:
    own = dict.fromkeys(recipe.nodes)
    for node in dict.fromkeys(n for each in own for n in each.all_input_nodes):
        if node not in own and any(n.op != "placeholder" for n in joint.ends(node)):
            yield node


NEVER = Timeline(NO_JOBS, (), (), ())


@dataclass(frozen=True)
class Step:
    """A step of all workers; each pass over it fills in more.

    graph: the graph of stages, with a call for each kind of job.
    timeline: when each job should run. Its jobs have their workers and n.
    credits: the B (or W) that each capped F waits for.
    recipes: what a job of each kind is made of.
    lines: of all workers, in the global order.
    buffers: what F on each worker leaves of a group of buffers, by group and worker.
    results: what each worker returns, in values.
    posts: receives that an op posts when its task begins; others are posted when they
        are taken.
    every: how many microbatches an update is for; None if there are none.
    """

    graph: fx.GraphModule
    timeline: Timeline = NEVER
    credits: Mapping[Job, Job] = field(default_factory=dict)
    recipes: tuple[Recipe, ...] = ()
    lines: Sequence[Op | Message] = ()
    buffers: Mapping[tuple[int, int], JobOutput] = field(default_factory=dict)
    results: Mapping[int, dict[str, Any]] = field(default_factory=dict)
    posts: Mapping[Op, Sequence[Message]] = field(default_factory=dict)
    every: int | None = None

    @cached_property
    def reads(self) -> list[tuple[fx.Node, ...]]:
        """By kind of job, the nodes that it reads of others, weights and rows of the
        batch aside; pointers among them, as a stage of the global batch has them."""
        return [tuple(_read_nodes(recipe)) for recipe in self.recipes]

    @property
    def facts(self) -> Facts:
        """What is known of the model."""
        return facts(self.graph)

    def round(self, microbatch: int) -> int:
        """How many updates come before those that a microbatch's gradients are for."""
        return 0 if self.every is None else microbatch // self.every

    @cached_property
    def weight_inputs(self) -> dict[int, fx.Node]:
        """The inputs of the graph of stages that are weights, by group."""
        nodes = self.graph.graph.find_nodes(op="placeholder")
        return {
            of_call(node)["group"]: node for node in nodes if "group" in of_call(node)
        }

    @cached_property
    def shared(self) -> dict[Op, list[Message]]:
        """The messages that an all_reduce is made of, by op: of all its workers."""
        of_value: dict[Value, list[Message]] = {}
        for line in self.lines:
            if isinstance(line, Message) and line.among:
                of_value.setdefault(line.value, []).append(line)
        return {
            op: [each for value in values_in(op.args) for each in of_value[value]]
            for op in self.ops
            if op.target is ops.all_reduce
        }

    @cached_property
    def ways(self) -> set[Way]:
        """What its messages and sums go over."""
        messages = (line for line in self.lines if isinstance(line, Message))
        return {frozenset(each.among) or (each.source, each.to) for each in messages}

    @property
    def jobs(self) -> Jobs:
        """The jobs of the step, with their workers and n."""
        return self.timeline.jobs

    @property
    def ops(self) -> Iterator[Op]:
        """The lines that are no messages."""
        return (line for line in self.lines if isinstance(line, Op))

    @cached_property
    def lines_of(self) -> list[list[Op | Message]]:
        """The lines of each worker; a message is one of both its workers."""
        found: list[list[Op | Message]] = [[] for _ in range(self.jobs.workers)]
        for line in self.lines:
            ends = (line.worker,) if isinstance(line, Op) else (line.source, line.to)
            for worker in ends:
                found[worker].append(line)
        return found

    def recipe(self, job: Job) -> Recipe:
        """What an F, B or W is made of."""
        return self.recipes[self.jobs.at[job.stage, job.direction]]

    @property
    def deferred(self) -> bool:
        """Whether B runs in backward(), when all F are done."""
        return self.facts.loss is None

    @property
    def order(self) -> list[int]:
        """The numbers of all jobs, in the global order."""
        order, jobs = list(self.timeline.order), self.jobs
        if self.deferred:
            backward = [d is not Direction.FORWARD for _, d in jobs.kinds]
            order.sort(key=lambda i: backward[jobs.kind[i]])
        return order

    @property
    def draws(self) -> set[Kind]:
        """The kinds of jobs that draw random numbers."""
        pairs = zip(self.jobs.kinds, self.recipes, strict=False)  # updates have none
        return {
            kind for kind, recipe in pairs if of_call(recipe.call)["draw"] is not None
        }

    @cached_property
    def maker(self) -> dict[fx.Node, int]:
        """The kind of job that makes each value."""
        return {n: kind for kind, each in enumerate(self.recipes) for n in each.nodes}

    @cached_property
    def gives(self) -> list[list[fx.Node]]:
        """By kind of job, what it gives of groups: gradients, or F buffers."""
        return [[n for n in r.nodes if "group" in of_call(n)] for r in self.recipes]

    @cached_property
    def _gradients(self) -> dict[int, fx.Node]:
        """A gradient of each group."""
        backward = (d is not Direction.FORWARD for _, d in self.jobs.kinds)
        pairs = zip(self.gives, backward, strict=False)
        return {
            of_call(n)["group"]: n for nodes, is_one in pairs if is_one for n in nodes
        }

    def worker(self, value: Value) -> int:
        """The worker that has a value first."""
        if isinstance(value, (Weights, Op)):
            return value.worker
        if isinstance(value, JobOutput):
            number = self.jobs.find(self.maker[value.node], value.microbatch)
            return self.jobs.worker[number]
        if isinstance(value, Total):
            if value.replica is not None:
                return value.replica
            return root_of(self.facts.groups[value.group], value.group)
        if isinstance(value, Credit):
            return self.jobs.worker[self.jobs.number(value.job)]
        assert isinstance(value, Stale), "others are of no one worker"
        return self.worker(value.value)

    def specs(self, value: Value) -> tuple[Specs, bool]:
        """The shapes of a value, and whether it is a bundle of tensors."""
        if isinstance(value, Credit):
            return (TOKEN,), False
        if isinstance(value, Op):
            if value.target in (ops.offload, ops.reload):
                return self.specs(value.args[-1])
            return value.specs, value.target in ops.BUNDLES
        if isinstance(value, Total):  # of the type that weights have
            return self.trained_specs(value.group), True
        if isinstance(value, JobOutput):
            meta = value.node.meta
            return meta["specs"], meta.get("bundle", False)
        if isinstance(value, (Stale, Message)):
            return self.specs(value.value)
        node = value.node if isinstance(value, Weights) else value
        return of_call(node)["specs"], True

    def group(self, value: Value) -> int:
        """The group of weights that a value is."""
        if isinstance(value, (Stale, Message)):
            return self.group(value.value)
        if isinstance(value, Op):
            assert value.group is not None
            return value.group
        assert isinstance(value, Weights)
        group: int = of_call(value.node)["group"]
        return group

    def trained_specs(self, group: int) -> Specs:
        """The shapes of a group's weights that get gradients."""
        specs = of_call(self.weight_inputs[group])["specs"]
        pairs = zip(specs, self.facts.groups[group].trained, strict=True)
        return tuple(spec for spec, trained in pairs if trained)

    def sum_specs(self, group: int) -> Specs:
        """The shapes of a group's gradients, as jobs give them."""
        specs: Specs = of_call(self._gradients[group])["specs"]
        return specs


def root_of(group: Group, number: int) -> int:
    """The worker that a group's gradients are summed on: the one that updates it, or
    one of its owners, each group another."""
    return sum_root(group.owners, number) if group.updater is None else group.updater


def replace_values(op: Op, new: Mapping[Any, Value]) -> None:
    """Has an op read other values in the place of these."""
    op.args = with_values(op.args, lambda value: new.get(value, value))


def with_weights(op: Op, new: Callable[[Any], Any]) -> None:
    """Has an F, B or W read something else in the place of its weights."""
    weights, reads = op.args
    op.args = (tuple([new(value) for value in weights]), reads)


def values_in(args: Any) -> Iterator[Any]:
    """The values among arguments, in order."""
    if isinstance(args, VALUES):
        yield args
    elif isinstance(args, (tuple, list, dict)):
        for each in args.values() if isinstance(args, dict) else args:
            yield from values_in(each)


def read(line: Op | Message, worker: int) -> Iterator[Value]:
    """What a line reads on a worker; a message, where it is sent."""
    if isinstance(line, Op):
        yield from values_in((line.args, line.after))
    elif line.source == worker:
        yield line.value


def with_values(args: Any, new: Callable[[Any], Any]) -> Any:
    """Arguments with something else in the place of each value."""
    if isinstance(args, VALUES):
        return new(args)
    if isinstance(args, dict):
        return {key: with_values(each, new) for key, each in args.items()}
    if isinstance(args, (tuple, list)):
        return type(args)(with_values(each, new) for each in args)
    return args
