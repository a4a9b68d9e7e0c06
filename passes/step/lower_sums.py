"""Says how every sum of gradients is added up: on which workers, and in which order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

from torch import fx

from ...ir import joint, ops
from ...ir.graphs import Specs, in_type
from ...ir.meta import of_call
from ...ir.pieces import layout_of, piece_specs
from ...ir.request import Request
from ...ir.step import (
    JobOutput,
    Message,
    Op,
    Step,
    Total,
    replace_values,
    values_in,
    with_values,
)
from ...jobs.job import ALL_ROWS, Direction, Job

Part = JobOutput | Op
Where = tuple[int, str, int]  # worker, task, n
READERS = (ops.update, ops.norms)  # of totals
LEAST = 1 << 14  # bytes of a piece


class Term(NamedTuple):
    """A gradient that is added up; terms are in the order in which autograd adds them:
    by microbatch, then by stage, the last one first.

    place: of its job among the lines.
    """

    microbatch: int
    before: int
    place: int
    value: JobOutput


def lower_sums(step: Step, request: Request) -> Step:
    """Each worker adds the gradients of its jobs to a sum of its own; the root adds up
    these, when it has done its next job.

    before: 0B0                                                      # worker 0
            0B1                                                      # worker 1
            weights_0_0U1 = update(0, 0, weights_0, gradients_0)     # worker 0
    after:  0B0                                                      # worker 0
            0B1                                                      # worker 1
            gradients_0 = reduce(0, grad_0_0, grad_0_1)              # worker 0
            weights_0_0U1 = update(0, 0, weights_0, gradients_0)     # worker 0

    The others' sums come in the meantime, and don't stay until the update. With
    request.deterministic there is one sum, of microbatches 0, 1, .. one after the other
    and of a microbatch's stages from the last to the first: on the worker that gives
    all, or else on the root, which gets each microbatch's gradients. A sum begins in
    request.gradient_dtype, and ends in the type of its weights.

    The gradient of what all microbatches read of a global-batch stage is a sum too: of
    each worker's, in the order of workers, or of all, in the order of microbatches. B
    of the global-batch stage takes it.
    """
    return _Sums(step, request).run()


class _Sums:
    """put, cast, next_job: what both ways to add up are made of."""

    def __init__(self, step: Step, request: Request) -> None:
        self.step, self.request = step, request
        self.lines = list(step.ops)
        self.before: dict[int, list[Op]] = {}  # new ops, by the line after them
        self.after: dict[int, list[Op]] = {}
        self.totals: dict[Total, Part | dict[int, Part]] = {}  # or by worker

    def run(self) -> Step:
        add = self._in_order if self.request.deterministic else self._by_worker
        for total, terms in sorted(self._terms().items(), key=lambda item: item[0][:2]):
            self.totals[total] = add(total, terms)
        for node in self.step.graph.graph.nodes:
            if node.target is joint.total:
                self._share(node)
        lines: list[Op | Message] = []
        for place, op in enumerate(self.lines):
            lines += [*self.before.get(place, ()), op, *self.after.get(place, ())]
            if op.target in READERS:
                op.args = self._found(op.args, op.worker)
        results = {w: self._found(own, w) for w, own in self.step.results.items()}
        return replace(self.step, lines=lines, results=results)

    def _found(self, args: Any, worker: int) -> Any:
        """Arguments with the values that totals are on a worker."""

        def found(value: Any) -> Any:
            total = self.totals.get(value, value)
            return total[worker] if isinstance(total, dict) else total

        return with_values(args, found)

    def _terms(self) -> dict[Total, list[Term]]:
        """What is added up, in the order of the jobs that give it."""
        step, terms = self.step, dict[Total, list[Term]]()
        alone = step.every is not None and self.request.schedule.average_every
        for place, op in self._jobs:
            job = op.job
            assert job is not None
            if job.direction in (Direction.FORWARD, Direction.UPDATE):
                continue
            b = job.microbatch
            for node in step.gives[step.jobs.at[job.stage, job.direction]]:
                replica = op.worker if alone else None
                total = Total(of_call(node)["group"], step.round(b), replica)
                term = Term(b, -job.stage, place, JobOutput(node, b))
                terms.setdefault(total, []).append(term)
        return terms

    # Each worker's sum, and the sum of these

    def _by_worker(self, total: Total, terms: Sequence[Term]) -> Part | dict[int, Part]:
        parts, places = dict[int, Part](), dict[int, int]()
        for term in terms:
            op, value = self.lines[term.place], term.value
            places[op.worker] = term.place
            if op.worker not in parts:
                parts[op.worker] = value
                continue
            args, name = (parts[op.worker], value), f"sum_{total.group}_of_{op.job}"
            specs, where = self.step.sum_specs(total.group), (op.worker, op.task, op.n)
            new = Op(*where, ops.accumulate, args, specs, name)
            parts[op.worker] = self.put(new, term.place)
        group, root = total.group, self.step.worker(total)
        first, last = self._readers.get(total), terms[-1].place
        if total.replica is not None:  # finished in the task of its update
            assert first is not None, "a replica's gradients are for its update"
            update = self.lines[first]
            where = (root, update.task, update.n)
            return self._finished(parts[root], group, where, first - 1)
        task = f"reduce {group}"
        task += f" of round {total.round}" * (self.step.every is not None)
        where, place = (root, task, self.lines[last].n), self.next_job(total, last)
        if list(parts) == [root]:
            return self._finished(parts[root], group, where, place)
        owners = self._takers.get(total, set())
        if self.request.sums_by_collective and len(owners) > 1 and owners <= {*parts}:
            return self._all_reduced(total, parts, places, self.lines[last].n)
        if self.request.sums_in_pieces:
            hosts = _SumByHosts(self, total, parts, places, self.lines[last].n)
            if self._can_be_cut(total, parts):
                return hosts.in_pieces()
            if hosts.send_several(root):
                return self._finished(hosts.whole(root), group, where, place)
        workers = sorted(parts)
        index = workers.index(root) if root in parts else 0
        sums = (index, *(parts[worker] for worker in workers))
        specs, name = self.step.sum_specs(group), f"gradients_{group}"
        new = self.put(Op(*where, ops.reduce, sums, specs, name, group), place)
        return self._finished(new, group, where, place)

    def _all_reduced(
        self, total: Total, parts: Mapping[int, Part], places: Mapping[int, int], n: int
    ) -> dict[int, Part]:
        """The sum on each of its owners, as the transport adds it up right after the
        last of them has given; it holds up who reads it. What others give one of the
        owners adds to its own first."""
        group, found = total.group, dict[int, Part]()
        specs, name = self.step.sum_specs(group), f"gradients_{group}"
        task = f"add up {group}"
        task += f" of round {total.round}" * (self.step.every is not None)
        ready, own = 0, list[Part]()
        near = self._nearest(self._takers[total], parts)
        for worker, givers in near.items():
            place, part = places[worker], parts[worker]
            if givers[1:]:
                place = max(places[giver] for giver in givers)
                place = self.next_job(total, place, worker)
                sums = givers.index(worker), *(parts[giver] for giver in givers)
                where = worker, f"{task} near worker {worker}", n
                part = Op(*where, ops.reduce, sums, specs, f"{name}_near_{worker}")
                self.put(part, place)
            ready = max(ready, place)
            own.append(part)
        first = self._readers.get(total, len(self.lines))
        for worker in near:
            where = worker, task, n
            args = tuple(near), *own
            new = Op(*where, ops.all_reduce, args, specs, name, group)
            self.put(new, ready)
            found[worker] = self._finished(new, group, where, first - 1)
        return found

    def _nearest(
        self, owners: Iterable[int], givers: Iterable[int]
    ) -> dict[int, list[int]]:
        """The workers whose gradients each owner gives to a sum, its own among them:
        by host, as many for each."""
        roots, others = (
            sorted(each, key=lambda worker: (self.request.host(worker), worker))
            for each in (owners, {*givers} - {*owners})
        )
        near = {root: [root] for root in roots}
        for i, giver in enumerate(others):
            near[roots[i * len(roots) // len(others)]].append(giver)
        return {root: sorted(each) for root, each in near.items()}

    def _can_be_cut(self, total: Total, parts: Mapping[int, Part]) -> bool:
        """Whether several workers want a sum, each of which adds to it."""
        owners = self._takers.get(total, set())
        specs = self.step.sum_specs(total.group)
        sizes = [spec.bytes for spec in specs]
        return (
            len(owners) > 1
            and owners <= parts.keys()
            and min(sizes) > 0
            and sum(sizes) >= LEAST * len(owners)
        )

    def _finished(self, value: Part, group: int, where: Where, place: int) -> Part:
        """A sum in the types of its weights."""
        specs = self.step.trained_specs(group)
        return self.cast(value, specs, where, place, f"finished_{group}")

    def cast(
        self, value: Part, specs: Specs, where: Where, place: int, name: str
    ) -> Part:
        """A value in other types, if it isn't in these."""
        if self.step.specs(value)[0] == specs:
            return value
        args = (value, tuple(spec.dtype for spec in specs))
        return self.put(Op(*where, ops.cast, args, specs, name), place)

    def _in_order(self, total: Total, terms: Sequence[Term]) -> Part:
        """The sum of microbatches in their order: added up in the jobs that give it, if
        one worker gives all; else in the root's next jobs, so that the others' come in
        the meantime."""
        group, root = total.group, self.step.worker(total)
        givers = {self.lines[term.place].worker for term in terms}
        giver, alone = min(givers), len(givers) == 1
        sum_of = f"{group}" + f" of round {total.round}" * bool(total.round)
        name = f"gradients_{sum_of}".replace(" ", "_")
        ready, value = 0, None  # the place of the last job that has given some

        def where(what: str) -> tuple[Where, int]:
            op = self.lines[ready]
            if alone:
                return (giver, op.task, op.n), ready
            task = f"add {what} to {sum_of}"
            return (root, task, op.n), self.next_job(total, ready)

        def added(what: str, *parts: Part) -> Op:
            at, place = where(what)
            specs, _ = self.step.specs(parts[0])
            target, args = (
                (ops.accumulate, parts) if alone else (ops.reduce, (0, *parts))
            )
            return self.put(Op(*at, target, args, specs, f"{name}_{what}"), place)

        for b, of_one in groupby(sorted(terms), key=lambda term: term.microbatch):
            first, *tied = of_one
            ready = max(ready, first.place, *(term.place for term in tied))
            new: Part = first.value
            for term in tied:  # tied weights
                new = added(f"{b}_{-term.before}", new, term.value)
            if value is None:
                specs = self.step.specs(new)[0]
                specs = in_type(specs, self.request.gradient_dtype)
                value = self.cast(new, specs, *where("0"), f"{name}_0")
            else:
                value = added(f"{b}", value, new)
        assert value is not None, "a total has terms"
        if alone and giver != root:  # which it is brought to
            alone = False
            value = added("all", value)
        return self._finished(value, group, *where("all"))

    # Of what all microbatches read

    def _share(self, pointer: fx.Node) -> None:
        """The sum of a gradient over all microbatches, before the global-batch job that
        takes it."""
        (gradient,) = pointer.all_input_nodes
        kind = self.step.maker[gradient]
        parts: dict[int, Part] = {}  # by worker, or by microbatch
        for place, op in self._of_kind(kind):
            assert op.job is not None
            value = JobOutput(gradient, op.job.microbatch)
            key = op.job.microbatch if self.request.deterministic else op.worker
            if key in parts:
                name, args = f"{gradient.name}_of_{op.job}", (parts[key], value)
                parts[key] = self.put(self._add(op, gradient, name, args), place)
            else:
                parts[key] = value
        for reader in sorted({self.step.maker[user] for user in pointer.users}):
            for place, op in self._of_kind(reader):
                every = tuple(parts[key] for key in sorted(parts))
                total = self._add(op, gradient, f"total_{gradient.name}", every)
                self.before.setdefault(place, []).append(total)
                replace_values(op, {JobOutput(pointer, ALL_ROWS): total})

    def _add(self, op: Op, like: fx.Node, name: str, args: tuple[Part, ...]) -> Op:
        specs = of_call(like)["specs"]
        return Op(op.worker, op.task, op.n, ops.add, args, specs, name)

    # Lines

    def put(self, op: Op, place: int) -> Op:
        self.after.setdefault(place, []).append(op)
        return op

    def _of_kind(self, kind: int) -> Iterator[tuple[int, Op]]:
        """The jobs of a kind, with their places."""
        at, jobs = self._places_of_jobs, self.step.jobs
        found = sorted(at[jobs.job(number)] for number in jobs.of(kind))
        return ((place, self.lines[place]) for place in found)

    def next_job(self, total: Total, ready: int, worker: int | None = None) -> int:
        """The place of a worker's next job after a line, by default the root's, but
        before what reads the total; that of the line itself, if there is none."""
        places = self._places[self.step.worker(total) if worker is None else worker]
        i = bisect_right(places, ready)
        place = places[i] if i < len(places) else ready
        return min(place, self._readers.get(total, len(self.lines)) - 1)

    @cached_property
    def _jobs(self) -> list[tuple[int, Op]]:
        """The jobs, with their places."""
        return [(i, op) for i, op in enumerate(self.lines) if op.job is not None]

    @cached_property
    def _places_of_jobs(self) -> dict[Job | None, int]:
        return {op.job: place for place, op in self._jobs}

    @cached_property
    def _places(self) -> list[list[int]]:
        """Of each worker's jobs."""
        places: list[list[int]] = [[] for _ in range(self.request.schedule.workers)]
        for place, op in self._jobs:
            places[op.worker].append(place)
        return places

    @cached_property
    def _takers(self) -> dict[Total, set[int]]:
        """The workers that read each total."""
        found: dict[Total, set[int]] = {}
        read = [(o.worker, o.args) for o in self.lines if o.target in READERS]
        for worker, args in (*read, *self.step.results.items()):
            for value in values_in(args):
                if isinstance(value, Total):
                    found.setdefault(value, set()).add(worker)
        return found

    @cached_property
    def _readers(self) -> dict[Total, int]:
        """Where the first task begins that reads each total."""
        first: dict[Total, int] = {}
        start, task = 0, None
        for place, op in enumerate(self.lines):
            if task != (op.worker, op.task):
                start, task = place, (op.worker, op.task)
            if op.target in READERS:
                for value in values_in(op.args):
                    if isinstance(value, Total):
                        first.setdefault(value, start)
        return first


class _SumByHosts:
    """A sum that is added up beside the jobs; what workers of one host give is added up
    there first.

    parts: the sum of each worker's own gradients. made: the lines after which these,
        and what is made of them, are there.
    """

    def __init__(
        self,
        sums: _Sums,
        total: Total,
        parts: Mapping[int, Part],
        places: Mapping[int, int],
        n: int,
    ) -> None:
        self.sums, self.total, self.parts, self.n = sums, total, parts, n
        self.made = {part: places[worker] for worker, part in parts.items()}
        self.owners = sorted(sums._takers[total])
        self.specs = sums.step.sum_specs(total.group)
        self.hosts: dict[int, list[int]] = {}
        for worker in sorted(parts):
            self.hosts.setdefault(sums.request.host(worker), []).append(worker)
        round = f"_of_round_{total.round}" * (sums.step.every is not None)
        self.name = f"{total.group}{round}"

    def send_several(self, root: int) -> bool:
        """Whether several workers of another host than the root's give to the sum."""
        own = self.sums.request.host(root)
        return any(host != own and len(w) > 1 for host, w in self.hosts.items())

    def whole(self, root: int) -> Op:
        """The sum on its root."""
        number = self.total.group
        name = f"gradients_{self.name}"
        *_, found = self._steps(number, root, self.parts, name)
        assert isinstance(found, Op), "several give"
        found.group = number
        return found

    def in_pieces(self) -> dict[int, Part]:
        """The sum on each of its owners. Each adds up one piece of it, and sends that
        to all others, as in a reduce-scatter and an all-gather."""
        layout, count = layout_of(self.specs), range(len(self.owners))
        given = [{w: self._given(i, w) for w in self.parts} for i in count]
        pairs = zip(self.owners, given, strict=True)
        steps = (
            self._steps(i, *pair, f"piece_{i}_of_{self.name}")
            for i, pair in enumerate(pairs)
        )
        *_, pieces = zip(*steps, strict=True)  # all pieces' first steps are first
        first = self.sums._readers.get(self.total, len(self.sums.lines))
        found: dict[int, Part] = {}
        for worker in self.owners:
            where, group = (worker, f"join {self.name}", self.n), self.total.group
            name = f"gradients_{self.name}_on_worker_{worker}"
            args = layout, *pieces
            new = Op(*where, ops.join, args, self.specs, name, group)
            self.sums.put(new, first - 1)
            found[worker] = self.sums._finished(new, group, where, first - 1)
        return found

    def _steps(
        self, number: int, root: int, given: Mapping[int, Part], name: str
    ) -> Iterator[Part]:
        """What is added up, host after host; at last the sum of what all give, on its
        root.

        number: says which worker of another host adds up what that gives.
        """
        parts: list[Part] = []
        own, ring = self.sums.request.host(root), self.sums.request.sums_in_ring
        hosts = sorted(self.hosts, key=lambda host: (ring and host <= own, host))
        for host in hosts:
            workers = self.hosts[host]
            adds = root if host == own else workers[number % len(workers)]
            those = [given[worker] for worker in workers]
            parts.append(self._add(f"{name}_of_host_{host}", adds, those))
            if ring and host != hosts[-1]:
                parts = [self._add(f"{name}_up_to_host_{host}", adds, parts)]
            yield parts[-1]
        yield self._add(name, root, parts)

    def _given(self, number: int, worker: int) -> Op:
        """A piece of what a worker gives."""
        own = self.parts[worker]
        op, count = self.sums.lines[self.made[own]], len(self.owners)
        args = number, count, layout_of(self.specs), own
        name = f"piece_{number}_of_{self.name}_on_worker_{worker}"
        where, specs = (op.worker, op.task, op.n), piece_specs(*args[:2], self.specs)
        return self._put(Op(*where, ops.piece, args, specs, name), self.made[own])

    def _add(self, name: str, worker: int, parts: Sequence[Part]) -> Part:
        if len(parts) == 1:
            return parts[0]
        at = [*map(self.sums.step.worker, parts)]
        args = at.index(worker) if worker in at else 0, *parts
        task, place = f"add {name.replace('_', ' ')}", max(self.made[p] for p in parts)
        where, specs = (worker, task, self.n), self.sums.step.specs(parts[0])[0]
        sums = (isinstance(p, Op) and p.target is ops.reduce for p in parts)
        lane = 1 + any(sums)  # of hosts, and of all
        lane *= not self.sums.request.ordered  # where one thread sends
        return self._put(Op(*where, ops.reduce, args, specs, name, aside=lane), place)

    def _put(self, op: Op, place: int) -> Op:
        self.made[op] = place
        return self.sums.put(op, place)
