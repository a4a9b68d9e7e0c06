"""Moves values to the workers that read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count
from operator import itemgetter

from ...ir import ops
from ...ir.encodings import Code, Codes, codes_of, encoded_specs
from ...ir.graphs import Role
from ...ir.meta import of_call
from ...ir.moved import Moved, moved
from ...ir.request import Request
from ...ir.step import (
    Credit,
    JobOutput,
    Message,
    Op,
    Step,
    Value,
    replace_values,
    values_in,
)


def route_values(step: Step, request: Request) -> Step:
    """A message for each worker that reads what another one makes or keeps.

    before: 0F0, weights_0 of worker 0                               # worker 0
            1F0, weights_1 of worker 0                               # worker 1
    after:  message 0: weights_1 from worker 0 to worker 1
            0F0, weights_0 of worker 0                               # worker 0
            message 1: a_0 from worker 0 to worker 1
            1F0, message 0                                           # worker 1

    A worker gets a value once, after the op that makes it, however many of its jobs
    read it. It asks for a job's weights once it has those of no more than request.ahead
    others (here 1); they are kept while its next job reads them too, and new ones come
    after the update that makes them. From another host it asks for none that a worker
    of its own host has or waits for: that one hands them on. request.encode says what
    travels in fewer bytes: of activations what jobs alone read, aside from what is
    saved for B; of weights the parameters that jobs ask for.
    """
    tags, encodings = count(), _Encodings(step, request)
    step = replace(step, lines=_with_weights(step, request, tags, encodings))
    readers = _Readers(step)
    lines, shared = list[Op | Message](), set[Value]()  # that all_reduces add up
    later: list[tuple[int, Message]] = []  # on their way around a ring, by their turn
    for line in (*step.lines, None):
        if not isinstance(line, Op) or not line.aside:
            lines += (message for _, message in sorted(later, key=itemgetter(0)))
            later = []
        if line is None:
            break
        if isinstance(line, Message):
            lines.append(line)
            continue
        if line.target is ops.all_reduce and shared.isdisjoint(line.args[1:]):
            shared.update(line.args[1:])
            lines += _each_to_each(step, line, tags)
        lines.append(line)
        for value, workers in readers.of(line):
            for turn, (source, to) in enumerate(_ways(line, workers, request)):
                where = (next(tags), source, to, value, line.task, line.n)
                codes = encodings.of(value)
                specs = encoded_specs(codes, step.specs(value)[0])
                message = Message(*where, specs, codes=codes)
                if turn and line.aside and request.sums_in_ring:
                    later.append((turn, message))
                else:
                    lines.append(message)
    return replace(step, lines=lines)


def _each_to_each(step: Step, line: Op, tags: Iterator[int]) -> Iterator[Message]:
    """What an all_reduce is to the proof and the accounts."""
    workers, *parts = line.args
    for source, value in zip(workers, parts, strict=True):
        for to in workers:
            if to != source:
                where = (next(tags), source, to, value, line.task, line.n)
                yield Message(*where, step.specs(value)[0], among=workers)


def _ways(line: Op, to: set[int], request: Request) -> Iterator[tuple[int, int]]:
    """From whom to whom a value goes. What is made beside the jobs goes once to each
    other host, where one worker hands it on."""
    own, by_host = line.worker, dict[int, list[int]]()
    source, ring = own, request.sums_in_ring
    after = request.host(own) if ring else 0
    for worker in sorted(to - {own}, key=lambda w: (request.host(w) < after, w)):
        host = request.host(worker) if line.aside else worker
        by_host.setdefault(host, []).append(worker)
    for host, workers in by_host.items():
        if line.aside and host != request.host(own):
            first = workers.pop(own % len(workers))
            yield source, first
            yield from ((first, worker) for worker in workers)
            source = first if ring else own
        else:
            yield from ((own, worker) for worker in workers)


def _with_weights(
    step: Step, request: Request, tags: Iterator[int], encodings: _Encodings
) -> list[Op | Message]:
    """The lines, with messages that bring weights to jobs and renewals."""
    every, ahead = list(step.ops), request.ahead
    place = {op: i for i, op in enumerate(every)}
    at_hand: dict[int, dict[Value, Message]] = {}  # what the last job on a worker read
    jobs: dict[int, list[Op]] = {}  # of a worker
    fetching: dict[int, list[int]] = {}  # last readers of what was asked for
    on_host: dict[tuple[int, Value], tuple[int, Message, int]] = {}  # from when to when
    before: dict[Op, list[Message]] = {}
    after: dict[Op, list[Message]] = {}  # updates
    for op in every:
        is_job = op.target is None
        if not is_job and op.target is not ops.renew:
            continue
        start = op
        if is_job:
            own = jobs.setdefault(op.worker, [])
            asked = fetching.setdefault(op.worker, [])
            own.append(op)
            enough = len(asked) > ahead
            start = own[asked[-1 - ahead] + 1] if enough else every[0]
        here, read = at_hand.get(op.worker, {}), dict[Value, Message]()
        for value in op.args[0] if is_job else op.args:
            if (source := step.worker(value)) == op.worker:
                continue
            message = here.get(value) if is_job else None
            if message is None:
                codes = encodings.of_weights(value) if is_job else None
                specs = encoded_specs(codes, step.specs(value)[0])
                where = (op.task, op.n, specs)
                begin, host = place[start], request.host(op.worker)
                since, other, until = on_host.get((host, value), (0, None, -1))
                there = since <= begin <= until
                if other is not None and other.to != op.worker and there:
                    way = (next(tags), other.to, op.worker, other)
                else:
                    way = (next(tags), source, op.worker, value)
                message = Message(*way, *where, fetches=True, codes=codes)
                late = isinstance(value, Op) and is_job and place[value] >= begin
                if late:
                    after.setdefault(value, []).append(message)
                else:
                    before.setdefault(start, []).append(message)
                if is_job and not late and host != request.host(source):
                    on_host[host, value] = begin, message, place[op]
                if is_job and asked[-1:] != [len(own) - 1]:
                    asked.append(len(own) - 1)
            read[value] = message
        if read:
            replace_values(op, read)
        if is_job:
            if read and asked:  # it may read what the last one asked for
                asked[-1] = len(own) - 1
            at_hand[op.worker] = read
    return [
        line for op in every for line in (*before.get(op, ()), op, *after.get(op, ()))
    ]


class _Readers:
    """Which workers read what each op makes."""

    def __init__(self, step: Step) -> None:
        self.workers: dict[Value, set[int]] = {}
        for op in step.ops:
            if op.target is None:
                self._note((*op.args[1], *op.after), op.worker)  # weights have come
            elif op.target not in (ops.accumulate, ops.all_reduce):  # of its own
                self._note(values_in((op.args, op.after)), op.worker)
        for worker, results in step.results.items():
            self._note(values_in(results), worker)
        read = {value.node for value in self.workers if isinstance(value, JobOutput)}
        self.nodes = {
            kind: [node for node in recipe.nodes if node in read]
            for kind, recipe in zip(step.jobs.kinds, step.recipes, strict=False)
        }

    def _note(self, values: Iterable[Value], worker: int) -> None:
        for value in values:
            self.workers.setdefault(value, set()).add(worker)

    def of(self, op: Op) -> Iterator[tuple[Value, set[int]]]:
        """What an op makes that others read, in the order of its nodes."""
        job, made = op.job, list[Value]()
        if op.target is None and job is not None:
            nodes = self.nodes[job.stage, job.direction]
            made += [JobOutput(node, job.microbatch) for node in nodes]
            made.append(Credit(job))
        else:
            made.append(op)
        for value in made:
            if value in self.workers:
                yield value, self.workers[value]


class _Encodings:
    """How values travel."""

    def __init__(self, step: Step, request: Request) -> None:
        self.step, self.encode = step, request.encode
        exact = (op for op in step.ops if op.target not in (None, ops.offload))
        read = [op.args for op in exact]
        values = values_in([*read, *step.results.values()])
        self.exact = {v.node for v in values if isinstance(v, JobOutput)}

    def of(self, value: Value) -> Codes | None:
        """Of what a line makes."""
        if not any(self.encode):
            return None
        kind, how = moved(self.step, value), None
        if kind is Moved.GRADIENTS:
            how = self.encode.gradients
        elif kind is Moved.ACTIVATIONS and isinstance(value, JobOutput):
            exact = value.node in self.exact or of_call(value.node).get("bundle")
            how = None if exact else self.encode.activations
        return codes_of(self.step.specs(value)[0], how)

    def of_weights(self, value: Value) -> Codes | None:
        """Of weights that a job asks for: of parameters."""
        if self.encode.weights is None:
            return None
        group = self.step.facts.groups[self.step.group(value)]
        specs, _ = self.step.specs(value)
        pairs = zip(group.state, specs, strict=True)
        codes: list[Code | None] = []
        for each, spec in pairs:
            how = self.encode.weights if each.role is Role.PARAMETER else None
            codes += codes_of((spec,), how) or [None]
        return tuple(codes) if any(codes) else None
