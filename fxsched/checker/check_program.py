"""Evaluates one worker's finished program on symbols.

Each job and each update is held against the reference: then its results have its name.
What depends on messages is claimed in a summary, which the check of all programs
decides; so a rank needs no program but its own.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import fx

from ..ir import ops
from ..ir.graphs import arguments
from ..ir.meta import of_call
from ..jobs.job import Direction, Job
from .memory import OVERWRITES, Memory, is_job, order_tasks, task_of
from .reference import Reference
from .stage_digest import stage_digest
from .summary import Claim, End, Summary
from .symbols import (
    RECEIVED,
    Matcher,
    Open,
    Symbol,
    is_gradient,
    is_open,
    received,
    symbol,
    text,
)

GONE = Symbol(("nothing",))


def examine(rank: int, program: fx.GraphModule, reference: Reference) -> Summary:
    """The summary of a program; summary.fault says if it is not sound by itself."""
    return _Evaluation(rank, program, reference).run()


class _Evaluation:
    def __init__(
        self, rank: int, program: fx.GraphModule, reference: Reference
    ) -> None:
        self.rank, self.program, self.reference = rank, program, reference
        self.nodes = list(program.graph.nodes)
        self.names = {
            of_call(n)["replaces"] for n in self.nodes if "replaces" in of_call(n)
        }
        self.replaced = {n.name: n for n in self.nodes if n.name in self.names}
        self.summary = Summary(rank)
        self.matcher = Matcher(reference.gradient)
        self.values: dict[fx.Node, Any] = {}
        self.memory = Memory(rank, self.nodes, reference)
        self.updated: Counter[tuple[str, int]] = Counter()
        self.noted: dict[str, Job] = {}  # by task
        self.notes: Counter[str] = Counter()
        self.read: Counter[tuple[int, int]] = Counter()  # copies, by group and b
        self.digests: dict[Any, bytes] = {}
        self.state: dict[int, Any] = {}  # buffers, by group
        self.messages: list[tuple[fx.Node, fx.Node]] = []  # values, and sends or recvs
        self.kept: dict[int, Any] = {}  # what is in the memory of a group's weights

    def run(self) -> Summary:
        """Evaluates all nodes, the first fault or not: the summary is of all."""
        read = [node.all_input_nodes for node in self.nodes]
        self.positions = order_tasks(self.nodes, read, self.summary)
        self._check_jobs()
        for node, inputs in zip(self.nodes, read, strict=True):
            if node.op == "placeholder":
                value = self.values[node] = self.reference.placeholder(node, self.rank)
                self.memory.give(node)
                if "group" in of_call(node):
                    self.kept[of_call(node)["group"]] = value
                continue
            if fault := self.memory.read(node, inputs):
                self._fault(fault)
            if node.op == "output":
                self._ends_with(node)
            elif node.target is not ops.free:
                value = self.values[node] = self._evaluated(node)
                if fault := self.memory.make(node, inputs):
                    self._fault(fault)
                if node.target in OVERWRITES and "group" in of_call(node):
                    self.kept[of_call(node)["group"]] = value
        self.summary.left = self.state
        self._end_messages()
        return self.summary

    def _end_messages(self) -> None:
        """Notes what becomes of the memory of messages, once all of it is known."""
        changed, ends = self.memory.changed, self.summary.ends
        for i, (value, node) in enumerate(self.messages):
            if value.target is ops.all_reduce:  # which copies what it sends
                continue
            over = changed.get(value) if changed else None
            # an average waits for all replicas, and so does what takes it
            if over is not None and over.target is not ops.take:
                ends[i] = ends[i]._replace(stays=False)
            if value is not node and not self.memory.ends_with(value, node):
                ends[i] = ends[i]._replace(last=False)

    # Faults and claims

    def _fault(self, what: str) -> None:
        """Notes what is wrong: the first fault, for all of the program is evaluated."""
        self.summary.fault = self.summary.fault or what

    def _claim(self, what: str, actual: Any, wanted: Any) -> None:
        """A value is the wanted one."""
        if actual == wanted:
            return
        claim = Claim(what, actual, wanted)
        if is_open(actual) or is_open(wanted) or has_sums(wanted):
            self.summary.claims.append(claim)
        elif not self.matcher.matches(actual, wanted):
            self._fault(f"worker {self.rank}: {fault_text(claim)}")

    # Values

    def _of(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self.values.get(value, GONE)
        if isinstance(value, (tuple, list)):
            return tuple([self._of(each) for each in value])
        if isinstance(value, dict):
            return {key: self._of(each) for key, each in value.items()}
        return value

    def _evaluated(self, node: fx.Node) -> Any:
        try:
            return self._evaluate(node)
        except (AttributeError, LookupError, TypeError, ValueError):
            called = node.format_node()
            self._fault(f"{self.memory.where(node)} can't be called so: {called}")
            return GONE

    def _evaluate(self, node: fx.Node) -> Any:
        target = node.target
        if is_job(node):
            return self._job(node)
        if "replaces" in of_call(node):
            return self._of(self.replaced.get(of_call(node)["replaces"], GONE))
        if node.op != "call_function":
            kind = "." if node.op == "call_method" else ""
            return symbol(f"{kind}{target}", self._of(node.args), *_named(node, self))
        rule, plain = EVALUATE.get(target), SYMBOLS.get(target)
        if rule is not None:
            return rule(self, node)
        if plain is not None:
            return plain(*self._of(node.args))
        word = getattr(target, "__name__", str(target))
        if getattr(ops, word, None) is target:
            return symbol(word, *self._of(node.args))
        where = getattr(target, "__module__", "")
        return symbol(f"{where}.{word}", *self._of(node.args), *_named(node, self))

    def _job(self, node: fx.Node) -> Any:
        """A job has the arguments that it should; then its results have its name."""
        job: Job = of_call(node)["job"]
        number = self.reference.number(job)
        if number < 0:
            return GONE
        name = self.reference.name(number)
        target, wanted = self.reference.call(job, self.state)
        replaced = "replaces" in of_call(node)
        if node.target == target or replaced:
            self._check_stage(str(node.target), target, replaced)
        else:
            self._fault(f"worker {self.rank}: {name} calls {node.target}")
        read = arguments(node)
        if len(read) != len(wanted):
            self._fault(f"worker {self.rank}: {name} reads {len(read)} arguments")
        for mine, want in zip(read, wanted, strict=False):
            nested = isinstance(mine, (tuple, list)) and type(want) is tuple
            if nested and len(mine) == len(want):
                for one, other in zip(mine, want, strict=True):
                    self._read(name, one, other)
                    if self.reference.every and self.reference.is_stale(job, other):
                        self._must_stay(self._of(one), name)
            else:
                self._read(name, mine, want)
        results = self.reference.results_of(number)
        for group, position in self.reference.writes(job):
            self.state[group] = symbol("item", results, position)
        return results

    def _read(self, name: str, value: Any, wanted: Any) -> None:
        actual = self._of(value)
        if actual is not wanted and actual != wanted:
            self._claim(f"{name} reads {value}, which is", actual, wanted)

    def _check_stage(self, name: str, planned: str, replaced: bool) -> None:
        """A job calls the planned graph, or a pass says that it doesn't."""
        if name in self.summary.stages:
            return
        module = self.program.get_submodule(name)
        digest = self.summary.stages[name] = stage_digest(module, self.digests)
        replaced |= bool(getattr(module, "meta", {}).get("replaced"))
        if digest != self.reference.digests[planned] and not replaced:
            self._fault(
                f"worker {self.rank}: {name} computes something else than planned; a "
                "pass that means it changes what fxsched.passes.stage_graphs gives, or "
                "calls fxsched.passes.replaces"
            )

    def _item(self, node: fx.Node) -> Any:
        source, position = arguments(node)
        if not isinstance(source, fx.Node):
            return GONE
        return symbol("item", self._of(source), position)

    def _encode(self, node: fx.Node) -> Any:
        """What is sent of a value is rounded; all who read the value later read that,
        so that all have the same bits. Weights stay exact where they are kept."""
        codes, value = arguments(node)
        at = self.memory.at
        for user in value.users if "group" not in of_call(node) else ():
            if at[user] > at[node] and user.target is not ops.free:
                self._fault(
                    f"worker {self.rank}: {task_of(user)} reads {value} as it is, and "
                    f"others as {node} rounds it"
                )
        return symbol("encoded", codes, self._of(value))

    def _settle(self, node: fx.Node) -> Any:
        how, last, before, *after = arguments(node)
        if len(after) == 1:
            return self._of(after[0])
        return symbol("merge_buffers", *self._of((tuple(how), last, before, *after)))

    def _factor(self, node: fx.Node) -> Any:
        limit, skips, places, *norms = self._of(node.args)
        pairs = ((norms[i] if i < len(norms) else GONE, k) for i, k in places)
        return symbol("factor", limit, skips, *pairs)

    def _received(self, node: fx.Node) -> Any:
        kwargs = dict[str, Any](node.kwargs)
        tag, source, specs = kwargs["tag"], kwargs["source"], of_call(node)["specs"]
        what = node.target.__name__  # type: ignore[union-attr]
        end = End(what, tag, source, of_call(node)["task"], -1, None, specs)
        self.summary.ends.append(end)
        self.messages.append((node, node))
        return received(tag)

    def _sent(self, node: fx.Node) -> None:
        value, task = arguments(node)[0], of_call(node)["task"]
        kwargs: dict[str, Any] = node.kwargs
        to, tag = kwargs["to"], kwargs["tag"]
        at, sent, specs = self.positions[task], self._of(value), of_call(value)["specs"]
        self.summary.ends.append(End("send", tag, to, task, at, sent, specs))
        self.messages.append((value, node))

    def _all_reduced(self, node: fx.Node) -> Any:
        """Each worker sends its own to all others, which are added up in one order."""
        own, place, others = arguments(node)
        task, sent, specs = of_call(node)["task"], self._of(own), of_call(own)["specs"]
        at, parts, ends = self.positions[task], [], []
        for peer, leaves, comes in others:
            ends.append(End("send", leaves, peer, task, at, sent, specs))
            ends.append(End("recv", comes, peer, task, -1, None, specs))
            parts.append(received(comes))
        parts.insert(place, sent)
        self.summary.ends += sorted(ends, key=lambda end: end.tag)
        self.messages += [(node, node)] * len(ends)
        return symbol("sum", *parts)

    def _nothing(self, node: fx.Node) -> None:
        """Of an operation that gives no value."""

    def _pause(self, node: fx.Node) -> Any:
        self._results(self._of(node.args[0]), self.reference.called(self.rank))
        return Symbol(("pause",))

    def _update(self, node: fx.Node) -> Any:
        """An update takes what it should; then it gives the next version."""
        _, group, number, *read = arguments(node)
        task, reference = task_of(node), self.reference
        self.updated[task, group] += 1
        if reference.by_arrival:
            return self._update_on_arrival(node)
        names = ("the weights", "the gradients", "the factor")
        if not isinstance(number, int) or number >= reference.last_version:
            self._fault(f"worker {self.rank}: {task} is update {number} of {group}")
            return GONE
        wanted = reference.update(group, number, self.rank)
        for what, one, other in zip(names, read[:3], wanted, strict=True):
            self._claim(f"{task} takes {what} {one}, which is", self._of(one), other)
        return reference.updated(group, number + 1, self.rank)

    def _copy(self, node: fx.Node) -> Any:
        if self.reference.by_arrival:
            return self._read_on_arrival(node)
        return self._of(node.args[1])

    def _renew(self, node: fx.Node) -> Any:
        new = self._of(node.args[2])
        if self.reference.schedule.version is not None:
            self._must_stay(new, task_of(node))
        return new

    def _must_stay(self, weights: Any, reader: str) -> None:
        """Another worker's weights are read when it may have updated them again."""
        while isinstance(weights, Open) and weights.word == "decoded":
            weights = weights.args[-1]  # of which buffers are in the same memory
        if isinstance(weights, Open) and weights.word == RECEIVED:
            self.summary.stays.append((weights.args[0], reader))

    def _take(self, node: fx.Node) -> Any:
        """An average goes in the place of a replica when it should."""
        _, group, *taken = self._of(node.args)
        schedule, own = self.reference.schedule, taken[1]
        version = own[2] if len(own) == 4 and own[0] == "weights" else -1
        task = task_of(node)
        if version < 1 or not schedule.averages(version):
            self._fault(f"worker {self.rank}: {task} averages {text(own)}")
            return GONE
        wanted = self.reference.taken(group, version, self.rank)
        for one, other in zip(taken, wanted, strict=True):
            self._claim(f"{task} takes", one, other)
        return self.reference.weights(group, version, self.rank)

    # Updates in order of arrival: what is read is proved for each job

    def _note(self, node: fx.Node) -> None:
        job = Job.parse(arguments(node)[1])
        self.noted[task_of(node)] = job
        self.notes[str(job)] += 1

    def _noted(self, node: fx.Node) -> Job | None:
        """The read or the update that a node's task is noted as."""
        job = self.noted.get(task_of(node))
        if job is None:
            self._fault(f"worker {self.rank}: {task_of(node)} is not noted")
        return job

    def _read_on_arrival(self, node: fx.Node) -> Any:
        """A copy of weights for all jobs of a microbatch, after the update that their
        version names."""
        _, weights, *before = arguments(node)
        job, value = self._noted(node), self._of(weights)
        if job is None or value[:1] != ("live",):
            self._fault(f"worker {self.rank}: {task_of(node)} copies {text(value)}")
            return GONE
        group, b = value[1], job.microbatch
        stage = self.reference.groups[group].stages[0]
        self.read[group, b] += 1
        if job.direction is not Direction.FORWARD or job.stage != stage:
            self._fault(
                f"worker {self.rank}: {task_of(node)} copies weights of stage {stage} "
                f"for {job}"
            )
        version = self.reference.jobs.version(self.reference.number(job))
        if version:
            self._check_waits(job, before, [version - 1])
        return Symbol(("read", group, b))

    def _update_on_arrival(self, node: fx.Node) -> Any:
        _, group, number, weights, gradients, factor, *before = arguments(node)
        job = self._noted(node)
        if job is None:
            return GONE
        if number is not None:
            self._fault(f"worker {self.rank}: {job} is number {number} in the order")
        wanted = self.reference.update(group, job.microbatch, self.rank)
        read = weights, gradients, factor
        for one, other in zip(read, wanted, strict=True):
            self._claim(f"{job} takes {one}, which is", self._of(one), other)
        self._check_waits(job, before, self.reference.awaited(job))
        return Symbol(("updated", job.stage, job.microbatch))

    def _check_waits(self, job: Job, before: list[Any], wanted: list[int]) -> None:
        """A read or an update waits for updates of its stage."""
        awaited = {self._of(value) for value in before}
        for b in wanted:
            if Symbol(("updated", job.stage, b)) not in awaited:
                update = Job(job.stage, b, Direction.UPDATE)
                self._fault(f"worker {self.rank}: {job} does not wait for {update}")

    # The end

    def _ends_with(self, output: fx.Node) -> None:
        reference = self.reference
        self._check_updates()
        stays = self.memory.freed.union(output.all_input_nodes)
        for value in self.nodes:
            gives = value.target not in ops.VALUELESS and value.op.startswith("call")
            if gives and value not in stays:
                self._fault(f"worker {self.rank} never frees {value}")
        wanted = reference.given_back(self.rank)
        if not any(node.target is ops.pause for node in self.nodes):
            wanted = reference.called(self.rank) | wanted
        self._results(self._of(output.args[0]), wanted)
        if reference.every is None or reference.by_arrival:
            return
        for group, known in enumerate(reference.groups):
            if self.rank in known.owners and any(known.trained):
                value = self.kept.get(group, Symbol(("weights", group, 0)))
                last = reference.weights(group, reference.last_version, self.rank)
                names = ", ".join(known.names[:3])
                self._claim(f"the step leaves {names} as", value, last)

    def _check_jobs(self) -> None:
        """Jobs run once, where w says."""
        ran = Counter(of_call(node)["job"] for node in filter(is_job, self.nodes))
        reference = self.reference
        times = Counter({reference.number(job): n for job, n in ran.items()})
        mine = reference.jobs_on(self.rank)
        for number in times.keys() - set(mine):
            where = f"w puts it on {reference.jobs.worker[number]}"
            name = reference.name(number) if number >= 0 else "another job"
            where = where if number >= 0 else "there is no such job"
            self._fault(f"{name} runs on worker {self.rank}, but {where}")
        for number in mine:
            if times[number] != 1:
                self._fault(f"{reference.name(number)} runs {times[number]} times")

    def _check_updates(self) -> None:
        """Each update is there once, and so is each copy that jobs read."""
        wanted = Counter(
            (str(job), group) for job, group in self.reference.updates_on(self.rank)
        )
        for task, group in wanted - self.updated:
            self._fault(f"worker {self.rank}: {task} does not update group {group}")
        for task, group in self.updated - wanted:
            self._fault(
                f"worker {self.rank}: {task} updates group {group} once more than it "
                "should"
            )
        for job_text, count in self.notes.items():
            if count != 1:
                self._fault(f"worker {self.rank}: {job_text} is noted {count} times")
        for (group, b), count in self.read.items():
            if count != 1:
                self._fault(
                    f"worker {self.rank}: group {group} is copied {count} times for "
                    f"microbatch {b}"
                )

    def _results(self, actual: Any, wanted: dict[str, Any]) -> None:
        """What is returned is what should be."""
        for key, values in wanted.items():
            mine = actual.get(key, ()) if isinstance(actual, dict) else ()
            if isinstance(values, dict):
                for name, value in values.items():
                    if not isinstance(mine, dict) or name not in mine:
                        self._fault(self._lost(key, name))
                    else:
                        self._claim(f"{key}[{name}] is", mine[name], value)
                for name in mine if isinstance(mine, dict) else ():
                    if name not in values:
                        self._fault(f"worker {self.rank} returns {key}[{name}] too")
            elif len(mine) != len(values):
                self._fault(f"worker {self.rank} returns {len(mine)} {key}")
            else:
                for i, (one, other) in enumerate(zip(mine, values, strict=True)):
                    self._claim(f"{key}[{i}] is", one, other)

    def _lost(self, key: str, name: str) -> str:
        if key != "groups":
            return f"worker {self.rank} returns no {key}[{name}]"
        names = ", ".join(self.reference.groups[int(name)].names[:3])
        return f"worker {self.rank} keeps {names} but gets no gradient of it"


EVALUATE: dict[Any, Callable[[_Evaluation, fx.Node], Any]] = {
    operator.getitem: _Evaluation._item,
    ops.encode: _Evaluation._encode,
    ops.merge_buffers: _Evaluation._settle,
    ops.clip_factor: _Evaluation._factor,
    ops.recv: _Evaluation._received,
    ops.fetch: _Evaluation._received,
    ops.send: _Evaluation._sent,
    ops.all_reduce: _Evaluation._all_reduced,
    ops.free: _Evaluation._nothing,
    ops.wait: _Evaluation._nothing,
    ops.finite: _Evaluation._nothing,
    ops.pause: _Evaluation._pause,
    ops.update: _Evaluation._update,
    ops.copy: _Evaluation._copy,
    ops.renew: _Evaluation._renew,
    ops.take: _Evaluation._take,
    ops.note: _Evaluation._note,
}

# Of arguments that are symbols already.
SYMBOLS: dict[Any, Callable[..., Any]] = {
    ops.add: partial(symbol, "sum"),
    ops.accumulate: partial(symbol, "sum"),
    ops.reduce: lambda place, *sums: symbol("sum", *sums),
    ops.decode: partial(symbol, "decoded"),
    ops.decode_one: partial(symbol, "decoded"),
    ops.offload: lambda where, lent, value: symbol("offloaded", value),
    ops.reload: lambda handle, *before: symbol("reloaded", handle),
    ops.collect: lambda count, dim, *parts: _collected("collect", dim, count, parts),
    ops.total: lambda count, scale, *parts: _collected("total", scale, count, parts),
    ops.fold: lambda how, count, *parts: _collected("fold", how, count, parts),
    ops.correct: lambda optimizer, *read: symbol("correct", *read),
    ops.replica: lambda optimizer, group, moments, copied, weights: symbol(
        "replica", group, moments, weights
    ),
}


def _collected(word: str, how: Any, count: int, parts: Sequence[Any]) -> Any:
    return symbol("collected", (word, how), count, *parts)


def has_sums(wanted: Any) -> bool:
    """Whether a wanted symbol names a gradient: all its owners' are held together."""
    return is_gradient(wanted) or (
        isinstance(wanted, tuple) and any(map(has_sums, wanted))
    )


def fault_text(claim: Claim) -> str:
    """What a claim says that does not hold."""
    return f"{claim.what} {text(claim.actual)}; it should be {text(claim.wanted)}"


def _named(node: fx.Node, evaluation: _Evaluation) -> list[Any]:
    """Arguments of a call by name, in order."""
    return [
        (name, evaluation._of(value)) for name, value in sorted(node.kwargs.items())
    ]
