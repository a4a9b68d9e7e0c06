"""What each worker holds in a step, counted on the step's own lines.

A value is held from the op that makes it, or the message that brings it, until the last
one that reads it there; a receive that is posted early has its buffer from then on. B
lets go of activations as it goes: what it makes counts when these are gone. Values in
one memory are counted once: a running sum is in the memory of its first gradient,
updated weights in that of the old. On top come what a job holds while it runs alone,
outputs, and what replicas send to be averaged; only the first of these is counted. What
waits on the host or on disk is counted apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from torch import fx

from ..clock.memory import Memory, Peaks
from ..ir import ops
from ..ir.graphs import Role, arguments
from ..ir.meta import of_call
from ..ir.step import (
    OVER,
    JobOutput,
    Message,
    Op,
    Step,
    Value,
    Weights,
    read,
    values_in,
)
from ..jobs.job import Direction, Job
from ..passes.step.place_saved import parked_bytes

WEIGHTS, VERSIONS, FETCHED, GRADIENTS, STATE, ACTIVATIONS, TEMPORARY = range(7)
HOST, DISK = 7, 8
ELSEWHERE = {"host": HOST, "disk": DISK}
COPIES = (ops.copy, ops.correct, ops.replica, ops.average)
IN_PLACE = OVER | {ops.take: 2}  # as OVER
SUMS = (ops.reduce, ops.all_reduce, ops.piece, ops.join, ops.cast)


def held_bytes(step: Step, state: Mapping[int, int]) -> list[Peaks]:
    """The most bytes that each worker holds, by kind.

    state: of the optimizer's state, by position of the parameter in the call.
    """
    lives = _Lives(step)
    return [
        _peaks(lives, worker, resident)
        for worker, resident in enumerate(_resident(step, state))
    ]


class During(NamedTuple):
    """What a worker holds before its first job, and the most up to the end of each of
    its jobs since the one before; what comes after the last counts for the last."""

    resident: float
    jobs: list[tuple[Job, float]]


def held_during(step: Step, state: Mapping[int, int]) -> list[During]:
    """The bytes that each worker holds, job after job in its order.

    state: as for held_bytes.
    """
    lives = _Lives(step)
    return [
        During(sum(resident), _by_job(_walk(lives, worker, resident)))
        for worker, resident in enumerate(_resident(step, state))
    ]


def _by_job(
    lines: Iterator[tuple[Op | Message, list[float]]],
) -> list[tuple[Job, float]]:
    jobs: list[tuple[Job, float]] = []
    most = 0.0
    for line, now in lines:
        most = max(most, sum(now[:HOST]))
        if isinstance(line, Op) and line.job is not None:
            jobs.append((line.job, most))
            most = 0.0
    if jobs:
        job, its = jobs.pop()
        jobs.append((job, max(its, most)))
    return jobs


def trained_bytes(step: Step) -> list[int]:
    """Bytes of the weights that each worker updates."""
    updated = [0] * step.jobs.workers
    for number in step.weight_inputs:
        for worker in step.facts.groups[number].updaters:
            updated[worker] += _bytes(step.trained_specs(number))
    return updated


def _resident(step: Step, state: Mapping[int, int]) -> Iterator[list[float]]:
    """By worker, what stays: weights, and the optimizer's state of those that it
    updates, with their velocity where a drift is corrected by it, or the momentum of
    outer steps."""
    held = np.zeros((step.jobs.workers, DISK + 1))
    drifting = zip(step.jobs.kinds, step.jobs.gaps, strict=False)
    stages = {stage for (stage, _), gap in drifting if gap}
    outer = (op for op in step.ops if op.target is ops.take)
    stepped = {op.group for op in outer if isinstance(op.args[1], tuple)}
    for number, node in step.weight_inputs.items():
        group = step.facts.groups[number]
        pairs = list(zip(group.state, of_call(node)["specs"], strict=True))
        own = sum(spec.bytes for each, spec in pairs if each.role is not Role.SHARED)
        kept: float = sum(state.get(each.input, 0) for each in group.learned)
        drifts = step.every is not None and group.stages[0] in stages
        if drifts or number in stepped:
            kept += _bytes(step.trained_specs(number))
        held[list(group.owners), WEIGHTS] += own
        held[list(group.updaters), STATE] += kept
    rows: list[list[float]] = held.tolist()
    return iter(rows)


class Born(NamedTuple):
    """A value that a line makes on a worker; home: the value whose memory it is in."""

    value: Value
    kind: int | None
    size: float
    home: Value | None = None


class _Lives:
    """What each line makes and reads, by worker."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.makes = [
            [(node, *_output(node, d)) for node in recipe.nodes]
            for recipe, (_, d) in zip(step.recipes, step.jobs.kinds, strict=False)
        ]
        self.added = {
            (op.args[1], op.task) for op in step.ops if op.target is ops.accumulate
        }
        self.posted = {message for each in step.posts.values() for message in each}

    def made(self, line: Op | Message, worker: int) -> Iterator[Born]:
        """What a line makes on a worker."""
        if isinstance(line, Message):
            if line.to == worker and line not in self.posted and not line.among:
                yield self._received(line)
            return
        yield from map(self._received, self.step.posts.get(line, ()))
        job = line.job
        if line.target is None and job is not None:
            kind = self.step.jobs.at[job.stage, job.direction]
            for node, of, size in self.makes[kind]:
                value = JobOutput(node, job.microbatch)
                of = None if (value, line.task) in self.added else of
                yield Born(value, of, size)
            return
        size = _bytes(line.specs)
        if line.target is ops.accumulate:
            yield Born(line, GRADIENTS, size, line.args[0])
        elif line.target is ops.reduce:
            yield Born(line, GRADIENTS, size, line.args[1:][line.args[0]])
        elif line.target is ops.all_reduce:
            own = line.args[1 + line.args[0].index(worker)]
            yield Born(line, GRADIENTS, size, own)
        elif line.target is ops.piece:
            yield Born(line, GRADIENTS, size, line.args[-1])
        elif line.target in IN_PLACE:
            yield Born(line, WEIGHTS, size, line.args[IN_PLACE[line.target]])
        elif line.target in (ops.offload, ops.reload):
            handle = line if line.target is ops.offload else line.args[0]
            where, _, value = handle.args
            away, size = ELSEWHERE.get(where), parked_bytes(value, self.step)
            if away is None:
                yield Born(line, ACTIVATIONS, size, line.args[-1])
            else:
                yield Born(line, away if line is handle else ACTIVATIONS, size)
        elif line.target is ops.replica and not line.args[2]:  # what is there anyway
            yield Born(line, None, size)
        else:
            yield Born(line, self._kind(line), size)

    def temporary(self, op: Op, freed: Mapping[Value, float], grown: float) -> float:
        """Bytes that a job takes at most, beyond what is there at its end.

        freed: those of values that it is the last to read. grown: what is there at its
        end beyond what was when it began.
        """
        job = op.job
        assert job is not None, "only a job takes some"
        kind = self.step.jobs.at[job.stage, job.direction]
        recipe = self.step.recipes[kind]
        ways = of_call(recipe.call).get("moments")
        if ways is None:  # on paper
            return of_call(recipe.call).get("temporary", 0.0)
        given = _given(recipe.call, job.direction)
        sizes = {node: _output(node, job.direction)[1] for node in recipe.before}
        posted = map(self._received, self.step.posts.get(op, ()))
        most = now = sum(sizes.values()) + sum(born.size for born in posted)
        for node, value in zip(self.step.reads[kind], op.args[1], strict=True):
            sizes[node] = freed.get(value, 0.0)
            if node not in given.values():  # what is added up before the call
                now -= sizes[node] * (not of_call(node).get("bundle"))
        gradients = (JobOutput(n, job.microbatch) for n in self.step.gives[kind])
        adds = any((value, op.task) in self.added for value in gradients)
        for gone, size in ways[-1 if adds else 0]:
            now -= sum(sizes.get(given[i], 0.0) for i in gone)
            most = max(most, now + size)
        return max(0.0, most - grown)

    def _received(self, message: Message) -> Born:
        """What comes, once it is decoded."""
        value = message.value
        size: float = _bytes(self.step.specs(value)[0])
        if isinstance(value, JobOutput):
            size = of_call(value.node).get("received", size)
        if message.fetches:
            return Born(message, FETCHED, size)
        return Born(value, self._kind(value), size)

    def _kind(self, value: Value) -> int | None:
        if isinstance(value, JobOutput):
            kind = self.step.maker[value.node]
            return _output(value.node, self.step.jobs.kinds[kind][1])[0]
        if isinstance(value, Op):
            if value.target in COPIES:
                return VERSIONS
            # gradients of what all microbatches read, and what comes back
            if value.target in (ops.add, ops.reload):
                return ACTIVATIONS
            return GRADIENTS if value.target in (*SUMS, ops.accumulate) else None
        return None


def _peaks(lives: _Lives, worker: int, resident: list[float]) -> Peaks:
    most, each = list(resident), list(resident)
    for _, now in _walk(lives, worker, resident):
        if sum(now[:HOST]) > sum(most[:HOST]):
            most = list(now)
        each = list(map(max, each, now))
    return Peaks(Memory(*most[:HOST]), Memory(*each[:HOST]), *each[HOST:])


def _walk(
    lives: _Lives, worker: int, resident: list[float]
) -> Iterator[tuple[Op | Message, list[float]]]:
    """Each line of a worker with what it holds, by kind, once the line has made what it
    makes; one list for all lines, which changes."""
    lines = lives.step.lines_of[worker]
    last: dict[Value, int] = {}
    for place, line in enumerate(lines):
        for value in read(line, worker):
            last[value] = place
    for value in values_in(lives.step.results[worker]):
        last[value] = len(lines)
    ends: dict[int, list[Value]] = {}
    home: dict[Value, Value] = {}
    names: Counter[Value] = Counter()  # values that are alive, by their home
    held: dict[Value, tuple[int, float]] = {}  # kind and bytes, by home
    now = list(resident)

    def end(value: Value) -> None:
        names[home[value]] -= 1
        if not names[home[value]]:
            kind, size = held.pop(home[value])
            now[kind] -= size

    for place, line in enumerate(lines):
        ended, before = ends.pop(place, []), sum(now[:HOST])
        freed = {v: held[home[v]][1] for v in ended if names[home[v]] == 1}
        if _is_backward(line):  # it lets go of activations as it goes
            gone = {v for v in ended if held[home[v]][0] == ACTIVATIONS}
            for value in gone:
                end(value)
            ended = [value for value in ended if value not in gone]
        for born in lives.made(line, worker):
            where = home.get(born.home, born.home) if born.home else born.value
            if isinstance(where, Weights):
                home[born.value] = where  # which stay
            if isinstance(where, Weights) or born.kind is None:
                continue
            home[born.value] = where
            names[where] += 1
            end_at = last.get(born.value, place)
            at = ended if end_at == place else ends.setdefault(end_at, [])
            at.append(born.value)
            if where not in held:
                held[where] = born.kind, born.size
                now[born.kind] += born.size
        if _is_job(line):
            grown = sum(now[:HOST]) - before
            now[TEMPORARY] = lives.temporary(line, freed, grown)
        yield line, now
        now[TEMPORARY] = 0.0
        for value in ended:
            end(value)


def _given(call: fx.Node, direction: Direction) -> dict[int, Any]:
    """A call's inputs and tangents, by the numbers that job_moments gives them."""
    args = arguments(call)
    inputs, tangents = {
        Direction.FORWARD: (args[1], ()),
        Direction.BACKWARD: args[-3:-1],
    }.get(direction, ((), ()))
    return dict(enumerate(inputs)) | {-1 - i: each for i, each in enumerate(tangents)}


def _is_job(line: Op | Message) -> TypeGuard[Op]:
    return isinstance(line, Op) and line.target is None and line.job is not None


def _is_backward(line: Op | Message) -> bool:
    forward = Direction.FORWARD
    return _is_job(line) and line.job is not None and line.job.direction is not forward


def _output(node: fx.Node, direction: Direction) -> tuple[int | None, float]:
    """The kind and the bytes of what a job makes; the tuple of all its results takes
    none."""
    if node.op == "call_module":
        return None, 0
    size: float = of_call(node).get("held", _bytes(of_call(node)["specs"]))
    if "group" not in of_call(node):
        return ACTIVATIONS, size
    return (VERSIONS if direction is Direction.FORWARD else GRADIENTS), size


def _bytes(specs: Any) -> int:
    return sum(spec.bytes for spec in specs)
