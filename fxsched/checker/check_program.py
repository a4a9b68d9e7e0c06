"""What one worker's finished program shows by itself, and what others must know of it.

A program alone proves that its jobs are those that w puts there, that each calls its
own stage and reads values of its own microbatch, and that every value is there when it
is read and freed once. What it sends and receives is told to the others in a Summary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import fx

from ..ir import ops
from ..ir.graphs import Group, Specs, arguments, original, result
from ..jobs.job import Direction, Job, Placement
from .check_arrivals import ArrivalReads
from .check_averages import AverageReads
from .check_joint import joint_uses, rows_of, unread
from .check_order import sum_of
from .check_types import type_fault
from .check_updates import UpdateFault, Updates, WeightReads
from .summary import CheckError, End, Provenance, Summary, Use

RECEIVES = (ops.recv, ops.fetch)
NO_UPDATES = Updates()


def examine(
    rank: int,
    program: fx.GraphModule,
    placements: Mapping[Job, Placement],
    groups: Sequence[Group],
    updates: Updates = NO_UPDATES,
) -> Summary:
    """The summary of a program; summary.fault says if it is not sound by itself."""
    return _Examination(rank, program, placements, groups, updates).run()


STAGE = {
    Direction.FORWARD: "forward",
    Direction.BACKWARD: "backward",
    Direction.WEIGHT: "weight",
}
KEEPS = {  # the job that keeps values for B, and for W
    Direction.BACKWARD: Direction.FORWARD,
    Direction.WEIGHT: Direction.BACKWARD,
}


class _Examination:
    def __init__(
        self,
        rank: int,
        program: fx.GraphModule,
        placements: Mapping[Job, Placement],
        groups: Sequence[Group],
        updates: Updates,
    ) -> None:
        self.rank, self.program = rank, program
        self.placements, self.groups = placements, groups
        self.nodes = list(program.graph.nodes)
        self.calls = [
            node
            for node in self.nodes
            if "job" in node.meta and node.target is not ops.update
        ]
        planned = WeightReads(rank, self.nodes, groups, updates)
        self.averages = AverageReads(planned, self.nodes)
        self.weights: WeightReads | ArrivalReads = planned
        if updates.ahead:
            self.weights = ArrivalReads(rank, self.nodes, groups, updates, placements)
        self.in_order, self.sum_dtype = updates.in_order, updates.gradient_dtype
        self.joins = any(job.joint for job in placements)
        self.here = [job for job, w in placements.items() if w.compute == rank]
        self.summary = Summary(rank)
        self.positions: dict[str, int] = {}  # of tasks
        self.known: dict[fx.Node, int] = {}  # origins

    def run(self) -> Summary:
        checks: tuple[Callable[[], None], ...] = (
            self._jobs,
            self._reads,
            self._joint_reads,
            self._lives,
            self._gradients,
            self._updates,
        )
        self._tasks()
        for check in checks:  # all of them, for the summary is of all
            try:
                check()
            except CheckError as error:
                self.summary.fault = self.summary.fault or str(error)
        self._ends()
        self.summary.every = self.weights.all.every
        self.summary.in_order = self.in_order
        self.summary.alone = self.weights.all.average_every is not None
        return self.summary

    def _jobs(self) -> None:
        ran = Counter(node.meta["job"] for node in self.calls)
        for job in ran:
            if self.placements[job].compute != self.rank:
                raise CheckError(
                    f"{job} runs on worker {self.rank}, but w puts it on "
                    f"{self.placements[job].compute}"
                )
        for job in self.here:
            if ran[job] != 1:
                raise CheckError(f"{job} runs {ran[job]} times")

    def _reads(self) -> None:
        """A job calls its own stage, and reads values of its own microbatch, besides
        weights; B reads what its F saved, and W what its B carries."""
        mixed, misled = [], []
        for node in self.calls:
            job: Job = node.meta["job"]
            if node.target != f"{STAGE[job.direction]}_{job.stage}":
                misled.append(f"worker {self.rank}: {job} calls {node.target}")
            saved, wanted = node.args[1], None
            if job.direction in KEEPS:
                wanted = job._replace(direction=KEEPS[job.direction])
            read: list[fx.Node] = []
            fx.map_arg(node.args[1:], read.append)
            for argument in read:
                value, maker = original(argument), wanted if argument is saved else None
                if value.target in RECEIVES:
                    tag: Any = value.kwargs["tag"]
                    self.summary.uses.append(Use(job, value.name, tag, maker))
                    continue
                rows = rows_of(value, RECEIVES, self.joins)
                for tag in rows.received:
                    self.summary.uses.append(Use(job, value.name, tag, None))
                others = rows.microbatches - {job.microbatch}
                if others and not job.joint:
                    mixed.append(other_microbatch(self.rank, job, value.name, others))
                if maker is not None and _maker(value) != maker:
                    actual = _maker(value)
                    misled.append(
                        other_maker(self.rank, job, value.name, actual, maker)
                    )
        for fault in mixed + misled:
            raise CheckError(fault)

    def _joint_reads(self) -> None:
        """For the check of all programs, which sees all microbatches."""
        if self.joins:
            self.summary.joint_uses += joint_uses(self.rank, self.calls, RECEIVES)
            cut = [arguments(n)[2] for n in self.nodes if n.target is ops.rows]
            every = [1 + job.microbatch for job in self.placements]
            self.summary.microbatches = max(every + cut)
            self.summary.unread = unread(self.nodes, RECEIVES)

    def _tasks(self) -> None:
        """A task starts once all that it reads is there: what it reads of others here
        must be made by tasks before it."""
        calls = [n for n in self.nodes if n.op.startswith("call")]
        calls = [n for n in calls if n.target not in RECEIVES]
        for node in calls:
            self.positions.setdefault(node.meta["task"], len(self.positions))
        self.summary.tasks = list(self.positions)
        waits: dict[tuple[int, int], None] = {}
        for node in calls:
            if node.target is ops.free:
                continue
            position = self.positions[node.meta["task"]]
            for value in node.all_input_nodes:
                if value.target in RECEIVES:
                    tag: Any = value.kwargs["tag"]
                    waits[position, tag] = None
                elif value.op != "placeholder":
                    before = value.meta["task"]
                    if self.positions[before] > position:
                        self.summary.circle = (before, node.meta["task"])
        self.summary.waits = list(waits)

    def _lives(self) -> None:
        defined: set[fx.Node] = set()
        freed: set[fx.Node] = set()
        for node in self.nodes:
            inputs = node.all_input_nodes
            for value in inputs:
                if value not in defined:
                    raise CheckError(
                        f"{self._where(node)} reads {value} before it is made"
                    )
                if value in freed:
                    verb = "frees" if node.target is ops.free else "reads"
                    raise CheckError(
                        f"{self._where(node)} {verb} {value} after its free"
                    )
            if node.target is ops.free:
                freed.update(inputs)
            defined.add(node)
        returned = set(self.program.graph.output_node().all_input_nodes)
        for node in self.nodes:
            if node in freed or node in returned or not node.op.startswith("call"):
                continue
            if node.target not in ops.VALUELESS:
                raise CheckError(f"worker {self.rank} never frees {node}")

    def _gradients(self) -> None:
        """Each job gives the gradients that it should, and each group that is kept here
        gets one; the check of all programs says whether it is the right one."""
        split = any(job.direction is Direction.WEIGHT for job in self.placements)
        gives = Direction.WEIGHT if split else Direction.BACKWARD
        gradients = self.summary.gradients
        for node in self.nodes:
            group = node.meta.get("group")
            job = _maker(node) if group is not None else None
            if group is not None and job is not None and job.direction is gives:
                gradients.setdefault(group, []).append(job)
        trains = any(job.direction is Direction.BACKWARD for job in self.placements)
        returned = result(self.program).get("groups", {})
        lost = []
        for number, group in enumerate(self.groups):
            if not trains or not any(group.trained) or self.weights.all.every:
                continue
            if self.rank not in group.updaters:
                continue
            value = returned.get(str(number))
            if value is None:
                lost.append(
                    f"worker {self.rank} keeps {', '.join(group.names[:3])} but "
                    "gets no gradient of it"
                )
            else:
                self.summary.returns[number] = self._origin(value)
        self._all_give(gives)
        self.summary.fault = self.summary.fault or type_fault(
            self.rank, self.program, self.sum_dtype, self._added
        )
        if lost:
            raise CheckError(lost[0])

    def _added(self, node: fx.Node) -> set[int]:
        """The microbatches that a sum adds up here, one after the other."""
        jobs, _ = _contributions(node)
        return {job.microbatch for job in jobs or ()} if self.in_order else {0, 1}

    def _updates(self) -> None:
        try:
            self.weights.check_reads()
            for job, group, gradients in self.weights.updates():
                self.summary.updates.append((job, group, self._origin(gradients)))
            self.summary.averaged += self.averages.averaged()
        except UpdateFault as fault:
            raise CheckError(str(fault)) from fault
        finally:
            self.summary.weight_uses = self.weights.uses

    def _all_give(self, gives: Direction) -> None:
        givers = [
            set(self.summary.gradients.get(i, ())) for i in range(len(self.groups))
        ]
        wanted: dict[int, list[int]] = {}  # groups, by stage
        for number, group in enumerate(self.groups):
            for stage in group.givers:
                wanted.setdefault(stage, []).append(number)
        for job in self.here:
            for number in wanted.get(job.stage, ()) if job.direction is gives else ():
                if job not in givers[number]:
                    names = ", ".join(self.groups[number].names[:3])
                    raise CheckError(
                        f"{job} gives no gradient of group {number}: {names}"
                    )

    def _ends(self) -> None:
        for node in self.nodes:
            if node.target is ops.send:
                to, task = node.kwargs["to"], node.meta["task"]
                origin, position = self._origin(node.args[0]), self.positions[task]
                end = End("send", node.kwargs["tag"], to, task, position, origin, ())
            elif node.target in RECEIVES:
                what, task = node.target.__name__, node.meta["task"]
                tag, source = node.kwargs["tag"], node.kwargs["source"]
                end = End(what, tag, source, task, -1, -1, node.meta["specs"])
            else:
                continue
            self.summary.ends.append(end)

    def _origin(self, value: fx.Node) -> int:
        """The position of a value's origin."""
        if value not in self.known:
            self.known[value] = len(self.summary.origins)
            specs: Specs = value.meta["specs"]
            made = rows_of(value, RECEIVES, self.joins)
            source = original(value)
            tag: Any = source.kwargs["tag"] if source.target in RECEIVES else None
            adds, added = _contributions(value)
            rows = tuple(sorted(made.microbatches))
            self.summary.origins.append(
                Provenance(
                    specs,
                    tag,
                    _maker(value),
                    rows,
                    made.received,
                    adds,
                    added,
                    made.parts,
                    self.weights.of(value),
                    self.averages.part(value),
                    sum_of(value, RECEIVES, _maker) if self.in_order else None,
                )
            )
        return self.known[value]

    def _where(self, node: fx.Node) -> str:
        name = getattr(node.target, "__name__", str(node.target))
        if "tag" in node.kwargs:
            name = f"{name}(tag={node.kwargs['tag']})"
        return f"worker {self.rank}: {name} of {node.meta.get('task', node.name)}"


def _maker(value: fx.Node) -> Job | None:
    """The job that a part of its result comes from."""
    value = original(value)
    source = value.args[0] if value.args else None
    return source.meta.get("job") if isinstance(source, fx.Node) else None


def _contributions(node: fx.Node) -> tuple[tuple[Job, ...] | None, tuple[int, ...]]:
    """The jobs whose gradients a value adds up, and the messages."""
    jobs: list[Job] = []
    tags: list[int] = []
    open_ends = [node]
    while open_ends:
        node = original(open_ends.pop())
        if node.target in RECEIVES:
            tag: Any = node.kwargs["tag"]
            tags.append(tag)
        elif node.target in (ops.accumulate, ops.reduce, ops.cast):
            open_ends += [a for a in node.args if isinstance(a, fx.Node)]
        else:
            job = _maker(node)
            if job is None:
                return None, ()
            jobs.append(job)
    return tuple(jobs), tuple(tags)


def other_microbatch(rank: int, job: Job, name: str, others: Collection[int]) -> str:
    """The error for a job that reads another microbatch's value."""
    return f"worker {rank}: {job} reads {name}, which is of microbatch {min(others)}"


def other_maker(rank: int, job: Job, name: str, maker: Job | None, wanted: Job) -> str:
    """The error for a job that reads what another job than planned made."""
    return f"worker {rank}: {job} reads {name}, which {maker} made, not {wanted}"
