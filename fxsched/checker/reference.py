"""What each job, each update and each result should be, as symbols.

It is read off the graph of stages, off where jobs run, and off versions of weights, by
rules of its own: nothing here is shared with the passes that write the programs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import fx, nn

from ..clock.jobs import Jobs, Kind
from ..ir import joint
from ..ir.facts import facts
from ..ir.graphs import Group, Output, arguments, result
from ..ir.meta import of_call
from ..ir.request import Request
from ..jobs.job import Direction, Job
from .stage_digest import stage_digest
from .symbols import Symbol, latest, symbol

FORWARD = Direction.FORWARD


class Reference:
    """A step of a plan, as symbols; see symbols.py.

    gm: the graph of stages, as it is before passes of the user's run. jobs: all jobs,
    with the workers that w and u say.
    """

    def __init__(self, gm: fx.GraphModule, request: Request, jobs: Jobs) -> None:
        self.gm, self.request, self.jobs = gm, request, jobs
        self.known, self.schedule = facts(gm), request.schedule
        self.groups = self.known.groups
        self.microbatches = request.schedule.microbatches
        self.every = self.schedule.update_every if jobs.updates else None
        self.by_arrival = request.by_arrival and self.every is not None
        self.results: Mapping[str, Any] = result(gm)
        self.calls: dict[Kind, fx.Node] = {
            (of_call(node)["stage"], of_call(node)["direction"]): node
            for node in gm.graph.find_nodes(op="call_module")
        }
        known: dict[nn.Module, bytes] = {}
        self.digests = {
            str(call.target): stage_digest(gm.get_submodule(str(call.target)), known)
            for call in self.calls.values()
        }
        self.kinds = {call: jobs.at[kind] for kind, call in self.calls.items()}
        self.made: dict[int, Symbol] = {}  # by number of a job
        self.by_worker: dict[int, list[int]] = {}
        self.sums: dict[tuple[int, ...], Any] = {}

    # Jobs, and what they read

    def jobs_on(self, rank: int) -> list[int]:
        """The numbers of the jobs that run on a worker, without updates."""
        if not self.by_worker:
            jobs = self.jobs
            for number in range(jobs.regular):
                self.by_worker.setdefault(jobs.worker[number], []).append(number)
        return self.by_worker.get(rank, [])

    def number(self, job: Job) -> int:
        """The number of a job; -1 if there is no such job."""
        kind = self.jobs.at.get((job.stage, job.direction))
        if kind is None or not 0 <= job.microbatch < self.microbatches:
            return -1
        return self.jobs.find(kind, job.microbatch)

    def results_of(self, number: int) -> Symbol:
        """What a job gives."""
        made = self.made.get(number)
        if made is None:
            name = str(self.jobs.job(number))
            made = self.made[number] = Symbol(("job", name))
        return made

    def name(self, number: int) -> str:
        """A job, for people."""
        return str(self.results_of(number)[1])

    def call(self, job: Job, state: Mapping[int, Any]) -> tuple[str, Any]:
        """The stage that a job calls, and with what.

        state: by group, the buffers as F on its worker has left them.
        """
        call = self.calls[job.stage, job.direction]
        weights, *rest, _ = arguments(call)
        seed = None
        if of_call(call)["draw"] is not None:
            b = job.microbatch
            base = Symbol(("in", "seed"))
            seed = Symbol(("seed", base, of_call(call)["draw"], b, self.round(b)))
        read = tuple([self._weights(each, job, state) for each in weights])
        values = [self._values(each, job.microbatch) for each in rest]
        return str(call.target), (read, *values, seed)

    def _weights(self, node: fx.Node, job: Job, state: Mapping[int, Any]) -> Any:
        """The weights of a group as a job reads them."""
        number = of_call(node)["group"]
        group = self.groups[number]
        if group.written and job.direction is FORWARD and number in state:
            return state[number]
        if not any(group.trained) or self.every is None:
            return Symbol(("weights", number, 0))
        if self.by_arrival:
            return Symbol(("read", number, job.microbatch))
        at = self.number(job)
        version, gap = self.jobs.version(at), self.jobs.gap(at)
        read = self.weights(number, version, self._source(group, at))
        if gap:
            return Symbol(("correct", number, version, gap, read))
        return read

    def writes(self, job: Job) -> list[tuple[int, int]]:
        """The groups of buffers that a job writes, each with which of its results."""
        written: Mapping[str, fx.Node] = self.results["state"]
        if not written:
            return []
        call = self.calls[job.stage, job.direction]
        made = ((int(group), arguments(node)) for group, node in written.items())
        return [(group, position) for group, (of, position) in made if of is call]

    def is_stale(self, job: Job, weights: Any) -> bool:
        """Whether what a job reads are weights that may be updated again before it is
        over: the update does not wait for its gradient."""
        if type(weights) is not Symbol or weights[0] not in ("weights", "averaged"):
            return False
        _, group, version, *_ = weights
        gives = job.stage in self.groups[group].givers
        changes = any(self.groups[group].trained)
        return changes and not (gives and self.round(job.microbatch) <= version)

    def updated(self, group: int, version: int, owner: int) -> Symbol:
        """What an update makes; a replica may be averaged then."""
        alone = self.schedule.average_every is not None
        replica = (owner,) if alone else ()
        return Symbol(("weights", group, version, *replica))

    def _source(self, group: Group, number: int) -> int:
        """The worker whose weights a job reads: the one that w names, if it keeps them,
        or its own, or else the first that does."""
        jobs = self.jobs
        places = jobs.keeper[number], jobs.worker[number], group.owners[0]
        return next(worker for worker in places if worker in group.owners)

    def weights(self, group: int, version: int, owner: int) -> Symbol:
        """A group's weights after so many updates; of replicas, those of a worker."""
        if not version:
            return Symbol(("weights", group, 0))
        if self.schedule.average_every is None:
            return Symbol(("weights", group, version))
        word = "averaged" if self.schedule.averages(version) else "weights"
        return Symbol((word, group, version, owner))

    def is_planned(self, program: fx.GraphModule, stage: str) -> bool:
        """Whether a stage of a program is as it was before passes of the user's."""
        return stage_digest(program.get_submodule(stage), {}) == self.digests.get(stage)

    # Values

    def value(self, node: fx.Node, b: int) -> Any:
        """What a node of the graph of stages is in a microbatch."""
        target = node.target
        if target is operator.getitem:
            call, position = arguments(node)
            return Symbol(("item", self._result(call, b), position))
        if node.op == "placeholder":
            return self._input(node, b)
        if target is joint.of:
            return self.value(arguments(node)[0], arguments(node)[1])
        if target is joint.each:
            return self.value(arguments(node)[b], 0)
        if target is joint.total:
            return self._total(arguments(node)[0])
        word = getattr(target, "__name__", str(target))
        args = tuple(self._values(each, b) for each in node.args)
        if word == "loss_gradient" and self.request.scaled:
            args = (*args, Symbol(("in", "loss_scale")))
        return symbol(WORDS.get(word, word), *args)

    def _values(self, value: Any, b: int) -> Any:
        if isinstance(value, fx.Node):
            return self.value(value, b)
        if isinstance(value, (tuple, list)):
            return tuple([self._values(each, b) for each in value])
        return value

    def _result(self, call: fx.Node, b: int) -> Symbol:
        return self.results_of(self.jobs.find(self.kinds[call], b))

    def _is_joint(self, node: fx.Node) -> bool:
        """Whether a value is made once, by a job on all rows."""
        while node.op == "call_function" and node.args:
            if node.target is joint.of:
                return True
            if node.target is joint.each:
                return False
            node = next(each for each in node.args if isinstance(each, fx.Node))
        if node.op != "call_module":
            return False
        return self.kinds[node] in self.jobs.joint

    def _total(self, node: fx.Node) -> Any:
        """The sum of a value over all microbatches."""
        each = [self.value(node, b) for b in range(self.microbatches)]
        if self.request.deterministic or len(each) == 1:
            return symbol("sum", *each)
        return Symbol(("terms", *each))

    def _input(self, node: fx.Node, b: int) -> Any:
        if "tangent" in of_call(node):
            return self._tangent(of_call(node)["tangent"], b)
        value, dim = Symbol(("in", node.name)), of_call(node)["dim"]
        dims = (dim,) if dim else ()
        return Symbol(("rows", value, b, self.microbatches, *dims))

    def _tangent(self, position: int, b: int) -> Any:
        """A microbatch's part of the gradient that backward() hands in."""
        output, count = self.known.outputs[position], self.microbatches
        whole = symbol("item", Symbol(("pause",)), position)
        if output.kind == "rows":
            part = Symbol(("rows", whole, b, count, output.dim))
            return Symbol(("packed", part)) if output.dim else part
        return Symbol(("share", whole, self._share(output, b)))

    def _share(self, output: Output, b: int) -> float:
        if output.joint or output.kind == "whole":
            return 1.0
        if output.how == "last":
            return float(b == self.microbatches - 1)
        means = output.kind == "one"
        means |= output.kind == "folded" and output.how == "mean"
        means |= output.kind == "scalar" and self.request.loss_reduction == "mean"
        return 1.0 / self.microbatches if means else 1.0

    # Gradients and updates

    def round(self, b: int) -> int:
        """How many updates come before that of a microbatch's gradients."""
        return 0 if self.every is None else b // self.every

    def gradient(self, group: int, round: int, replica: int = -1) -> Any:
        """The sum of a group's gradients since an update; of a replica, its own.

        "terms" may be added up in any order, a "sum" may not.
        """
        key = group, round, replica
        if key not in self.sums:
            self.sums[key] = self._gradient(*key)
        return self.sums[key]

    def _gradient(self, group: int, round: int, replica: int) -> Any:
        nodes = sorted(
            self.results["groups"][str(group)], key=lambda node: -of_call(node)["stage"]
        )
        first = 0 if self.every is None else round * self.every
        of_round = range(first, first + (self.every or self.microbatches))
        by_microbatch = [
            [
                self.value(node, b)
                for node in nodes
                if (not self._is_joint(node) or b == 0)
                and (replica < 0 or self._maker(node, b) == replica)
            ]
            for b in of_round
        ]
        given = tuple(spec.dtype for spec in of_call(nodes[0])["specs"])
        wanted = self._weight_types(group)
        summed = given
        if self.request.deterministic:
            dtype = self.request.gradient_dtype
            if dtype is not None:
                summed = (dtype,) * len(given)
            parts = [symbol("sum", *terms) for terms in by_microbatch if terms]
            if summed != given:
                parts[0] = Symbol(("cast", parts[0], summed))
            total = symbol("sum", *parts)
        else:
            total = Symbol(("terms", *(t for terms in by_microbatch for t in terms)))
        return total if summed == wanted else Symbol(("cast", total, wanted))

    def _maker(self, node: fx.Node, b: int) -> int:
        """The worker that gives a gradient."""
        call = node.args[0]
        assert isinstance(call, fx.Node), "gradients are results of calls"
        return self.jobs.worker[self.jobs.find(self.kinds[call], b)]

    def _weight_types(self, group: int) -> tuple[Any, ...]:
        specs = of_call(self._weight_inputs[group])["specs"]
        pairs = zip(specs, self.groups[group].trained, strict=True)
        return tuple(spec.dtype for spec, trained in pairs if trained)

    @cached_property
    def _weight_inputs(self) -> dict[int, fx.Node]:
        nodes = self.gm.graph.find_nodes(op="placeholder")
        return {
            of_call(node)["group"]: node for node in nodes if "group" in of_call(node)
        }

    def updates_on(self, rank: int) -> Iterator[tuple[Job, int]]:
        """The updates of a worker: the job, and the group."""
        jobs = self.jobs
        for number in jobs.updates:
            if jobs.worker[number] != rank:
                continue
            stage, b, _ = jobs.job(number)
            for g, group in enumerate(self.groups):
                mine = group.stages[0] == stage and any(group.trained)
                if mine and rank in group.updaters:
                    yield Job(stage, b, Direction.UPDATE), g

    @property
    def last_version(self) -> int:
        """How many updates of each group a call has."""
        return 0 if self.every is None else self.microbatches // self.every

    def update(self, group: int, number: int, rank: int) -> tuple[Any, Any, Any]:
        """What an update takes: weights, gradients and their factor."""
        alone = self.schedule.average_every is not None
        weights = self.weights(group, number, rank)
        if self.by_arrival:
            weights = Symbol(("live", group))
        sums = Symbol(("gradient", group, number, rank if alone else -1))
        return weights, sums, self._factor(number)

    def _factor(self, round: int) -> Any:
        limit, skips = self.request.clip_grad_norm, self.request.skip_nonfinite
        if limit is None and not skips:
            return None
        rank = {position: i for i, position in enumerate(self.request.updates)}
        places: list[tuple[int, int, int]] = []
        for g, group in enumerate(self.groups):
            trained = [s for s, t in zip(group.state, group.trained, strict=True) if t]
            places += (
                (rank.get(s.input, s.input), g, k) for k, s in enumerate(trained)
            )
        norms = (
            (Symbol(("norms", Symbol(("gradient", g, round, -1)))), k)
            for _, g, k in sorted(places)
        )
        return Symbol(("factor", limit, skips, *norms))

    def awaited(self, update: Job) -> list[int]:
        """Of updates in order of arrival, those of its stage that one waits for, by
        microbatch: without them its worker could be more than `ahead` ahead."""
        release = self.jobs.at[update.stage, self.schedule.release]
        givers = [self.jobs.worker[number] for number in self.jobs.of(release)]
        given = [givers[:b].count(worker) for b, worker in enumerate(givers)]
        b = update.microbatch
        early = [i for i, n in enumerate(given) if n == given[b] - self.schedule.ahead]
        own = [i for i in range(b) if givers[i] == givers[b]]
        return [*own[-1:], *early]

    # Averages of replicas

    def average(self, group: int, version: int) -> Symbol:
        """The average of all replicas of a group after so many updates."""
        elastic, last = self.schedule.elastic, version == self.last_version
        moments = last or elastic is None
        replicas = (
            Symbol(("replica", group, moments, self.updated(group, version, worker)))
            for worker in sorted(self.groups[group].owners)
        )
        centre = None if elastic is None else self.centre(group, version, -1)
        return Symbol(("average", elastic, centre, *replicas))

    def centre(self, group: int, version: int, rank: int) -> Symbol:
        """That of elastic averaging, or of an outer step, before an average."""
        before = version - (self.schedule.average_every or 0)
        if before > 0 and self.schedule.outer is None:
            return self.average(group, before)
        return Symbol(("replica", group, False, self.weights(group, before, rank)))

    def taken(self, group: int, version: int, rank: int) -> tuple[Any, ...]:
        """What is put in the place of a replica: how, the replica, the average, and the
        centre."""
        how: Any = self.schedule.outer
        if how is None and version != self.last_version:  # all are the centre then
            how = self.schedule.elastic
        centre = None if how is None else self.centre(group, version, rank)
        own = self.updated(group, version, rank)
        return how, own, self.average(group, version), centre

    # Results

    def placeholder(self, node: fx.Node, rank: int) -> Any:
        """What an input of a program is on a worker."""
        number = of_call(node).get("group")
        if number is None:
            return Symbol(("in", node.name))
        group = self.groups[number]
        if self.by_arrival and any(group.trained):
            return Symbol(("live", number))
        behind = self.every is None and not self.request.updates
        if behind and group.updater not in (None, rank):
            return Symbol(("stale", number))
        return Symbol(("weights", number, 0))

    def called(self, rank: int) -> dict[str, Any]:
        """What a worker returns of the call: outputs, and state."""
        readers = self.request.readers
        reads = readers is None or rank in readers
        outputs: list[Any] = []
        versions: dict[str, Any] = {}
        pairs = zip(self.known.outputs, self.results["outputs"], strict=True)
        for output, value in pairs:
            if output.kept:
                owners = self._owners_of(output.state)
                if rank in owners:
                    versions[str(output.state)] = self._version(output, value, rank)
            elif reads:
                outputs.append(self._output(output, value, rank))
        state = {
            key: self._settled(int(key))
            for key in self.results["state"]
            if rank in self.groups[int(key)].owners
        }
        return {"outputs": tuple(outputs), "state": state, "versions": versions}

    def given_back(self, rank: int) -> dict[str, Any]:
        """What a worker returns of backward(): gradients."""
        readers = self.request.readers
        groups: dict[str, Any] = {}
        if self.every is None:
            groups = {
                key: Symbol(("gradient", int(key), 0, -1))
                for key in self.results["groups"]
                if rank in self.groups[int(key)].updaters
            }
        inputs: dict[str, Any] = {}
        for node in self.gm.graph.find_nodes(op="placeholder"):
            nodes = self.results["inputs"].get(str(of_call(node).get("input")))
            if nodes is None or not (readers is None or rank in readers):
                continue
            parts = (
                symbol("sum", *(self.value(each, b) for each in nodes))
                for b in range(self.microbatches)
            )
            inputs[str(of_call(node)["input"])] = Symbol(
                (("collect", of_call(node)["dim"]), *parts)
            )
        return {"groups": groups, "inputs": inputs}

    def _every(self, value: fx.Node) -> list[Any]:
        """A value of each microbatch; the one that there is, of one of all rows."""
        count = 1 if self._is_joint(value) else self.microbatches
        return [self.value(value, b) for b in range(count)]

    def _output(self, output: Output, value: Any, rank: int) -> Any:
        if output.kind in ("constant", "given"):
            if isinstance(value, fx.Node):
                return self.placeholder(value, rank)
            return value
        if output.kind in ("scalar", "folded"):
            return self._folded(output, value)
        if output.kind == "state":
            group, place = next(
                (int(key), i)
                for key in self.results["state"]
                for i, state in enumerate(self.groups[int(key)].state)
                if state.input == output.state
            )
            return symbol("own_copy", self._settled(group), place)
        if output.kind == "one" or output.joint:
            return Symbol((("collect", None), self._every(value)[-1]))
        return Symbol((("collect", output.dim), *self._every(value)))

    def _folded(self, output: Output, value: fx.Node) -> Any:
        """The loss, or what the microbatches' values become by what the user says."""
        every = self._every(value)
        if output.how is not None:
            return Symbol((("fold", output.how), *every))
        mean = self.request.loss_reduction == "mean"
        return Symbol((("total", 1.0 / len(every) if mean else 1.0), *every))

    def _owners_of(self, position: int | None) -> tuple[int, ...]:
        """The workers that keep a tensor of the model."""
        return next(
            group.owners
            for group in self.groups
            if any(state.input == position for state in group.state)
        )

    def _version(self, output: Output, value: fx.Node, rank: int) -> Any:
        """What state is after the step: the same in all microbatches, so that a worker
        has its own last one's."""
        if output.kind in ("scalar", "folded"):
            return self._folded(output, value)
        if self._is_joint(value) or value.op == "placeholder":
            return self._every(value)[-1]
        own = [b for b in range(self.microbatches) if self._maker(value, b) == rank]
        return self.value(value, own[-1] if own else self.microbatches - 1)

    def _settled(self, group: int) -> Any:
        """A group's buffers after the step."""
        written = self.results["state"][str(group)]
        workers = sorted({self._maker(written, b) for b in range(self.microbatches)})
        left: Sequence[Any] = [latest(group, worker) for worker in workers]
        if len(left) == 1:
            return left[0]
        last = workers.index(self._maker(written, self.microbatches - 1))
        how = tuple(
            self.request.buffers.get(state.name, self.known.writes[state.input].how)
            for state in self.groups[group].state
        )
        before = Symbol(("weights", group, 0))
        return symbol("merge_buffers", how, last, before, *left)


WORDS = {"add": "sum"}
