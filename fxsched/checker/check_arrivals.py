"""What one worker's program shows of updates in order of arrival.

There is no version to count: the proof is that whatever order tasks run in, each update
is there once and waits for what bounds it, nothing reads weights where updates change
them but what copies them, and all jobs of a microbatch read one copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from ..ir import ops
from ..ir.graphs import Group, arguments
from ..jobs.job import Direction, Job, Placement
from .check_updates import UpdateFault, Updates, Weights, WeightUse

READS = {ops.copy: 1, ops.update: 3}  # the argument that is the weights


class ArrivalReads:
    """The weights that a program's nodes read, where updates come in any order.

    uses: of those that came with messages: their version is the microbatch that they
        were copied for.
    """

    def __init__(
        self,
        rank: int,
        nodes: Sequence[fx.Node],
        groups: Sequence[Group],
        all: Updates,
        placements: Mapping[Job, Placement],
    ) -> None:
        self.rank, self.nodes, self.groups, self.all = rank, nodes, groups, all
        self.uses: list[WeightUse] = []
        self.trainers = _trainers(placements)
        self.noted: dict[str, Job] = {
            node.meta["task"]: Job.parse(arguments(node)[1])
            for node in nodes
            if node.target is ops.note
        }

    def of(self, value: fx.Node) -> Weights | None:
        """Of weights that this worker keeps. Their version is the microbatch that they
        are a copy for."""
        if value.target is ops.copy:
            return Weights(value.meta["group"], self._job(value).microbatch, True, 0.0)
        if value.target is ops.update or (
            value.op == "placeholder" and "group" in value.meta
        ):
            return Weights(value.meta["group"], 0, False, 0.0)
        return None

    def updates(self) -> Iterator[tuple[Job, int, fx.Node]]:
        """The updates here: job, group, gradients. Raises UpdateFault unless they are
        those that should be, each once and after what it waits for."""
        wanted = Counter(
            (job, number)
            for job, workers in self.all.workers.items()
            if self.rank in workers
            for number in self._groups_of(job.stage)
        )
        for node in self.nodes:
            if node.target is not ops.update:
                continue
            job, (group, number) = self._job(node), arguments(node)[1:3]
            if not wanted[job, group] or number is not None:
                self._fail(f"{job} updates group {group} once more than it should")
            wanted[job, group] -= 1
            for b in self._awaited(job):
                self._check_waits(node, Job(job.stage, b, Direction.UPDATE))
            yield job, group, arguments(node)[4]
        for job, group in wanted.elements():
            self._fail(f"{job} does not update group {group}")

    def check_reads(self) -> None:
        """Weights are copied once for each microbatch that reads them from here, after
        the update that its version names, and read in no other way."""
        notes = Counter(self._job(n) for n in self.nodes if n.target is ops.note)
        copies: Counter[tuple[int, int]] = Counter()
        for node in self.nodes:
            if node.target in READS:
                self._check_place(node)
                if notes[self._job(node)] != 1:
                    self._fail(
                        f"{self._job(node)} is noted {notes[self._job(node)]} times"
                    )
            if node.target is ops.copy:
                self._check_copy(node)
                copies[node.meta["group"], self._job(node).microbatch] += 1
            for value in node.all_input_nodes:
                if self._changes(value) and node.target not in (*READS, ops.free):
                    self._fail(f"{_task(node)} reads {value} while updates change it")
            if node.op == "call_module" and "job" in node.meta:
                self._check_job(node)
        for (group, b), count in copies.items():
            if count > 1:
                self._fail(f"group {group} is copied {count} times for microbatch {b}")

    def _check_place(self, node: fx.Node) -> None:
        """It reads the weights where all updates are made."""
        weights = arguments(node)[READS[node.target]]  # type: ignore[index]
        if weights.op != "placeholder" or weights.meta["group"] != node.meta["group"]:
            self._fail(f"{_task(node)} reads {weights}, and not the newest weights")

    def _check_copy(self, node: fx.Node) -> None:
        job = self._job(node)
        stage = self.groups[node.meta["group"]].stages[0]
        if job.direction is not Direction.FORWARD or job.stage != stage:
            self._fail(f"{_task(node)} copies weights of stage {stage} for {job}")
        version = self.all.seen(job)
        if version:
            self._check_waits(node, Job(stage, version - 1, Direction.UPDATE))

    def _check_waits(self, node: fx.Node, update: Job) -> None:
        """A node waits for an update of the same weights."""
        awaited = {
            self._job(value)
            for value in node.all_input_nodes
            if value.target is ops.update
        }
        if update not in awaited:
            self._fail(f"{self._job(node)} does not wait for {update}")

    def _check_job(self, node: fx.Node) -> None:
        job: Job = node.meta["job"]
        for value in node.args[0]:  # type: ignore[union-attr]
            group = value.meta.get("group") if isinstance(value, fx.Node) else None
            if group is None or not any(self.groups[group].trained):
                continue
            assert isinstance(value, fx.Node)
            read = Job(self.groups[group].stages[0], job.microbatch, Direction.FORWARD)
            if self.all.seen(job) != self.all.seen(read):
                self._fail(f"{job} reads other weights than {read}")
            if value.target is ops.fetch:
                tag: int = value.kwargs["tag"]  # type: ignore[assignment]
                use = WeightUse(str(job), group, tag, job.microbatch, True, 0.0)
                self.uses.append(use)
            elif self.of(value) != Weights(group, job.microbatch, True, 0.0):
                self._fail(f"{job} reads {value}, not the copy for its microbatch")

    def _awaited(self, update: Job) -> list[int]:
        """The updates of its stage, by microbatch, without which one could put its
        worker more than `ahead` ahead of another."""
        trainers = self.trainers[update.stage]
        given: Counter[int] = Counter()
        rounds, last = [], {}
        for b, worker in enumerate(trainers):
            rounds.append(given[worker])
            given[worker] += 1
            if b < update.microbatch:
                last[worker] = b
        own, b = trainers[update.microbatch], update.microbatch
        early = [i for i, r in enumerate(rounds) if r == rounds[b] - self.all.ahead]
        return [last[own], *early] if own in last else early

    def _groups_of(self, stage: int) -> list[int]:
        """The groups that a stage's updates are of."""
        return [
            number
            for number, group in enumerate(self.groups)
            if group.stages[0] == stage and any(group.trained)
        ]

    def _changes(self, value: fx.Node) -> bool:
        """Whether it is weights in the place where updates change them."""
        of = self.of(value)
        return of is not None and not of.copied and any(self.groups[of.group].trained)

    def _job(self, node: fx.Node) -> Job:
        """The read or the update that a node's task is noted as."""
        job = self.noted.get(_task(node))
        if job is None:
            self._fail(f"{_task(node)} is not noted")
        assert job is not None
        return job

    def _fail(self, what: str) -> None:
        raise UpdateFault(f"worker {self.rank}: {what}")


def _task(node: fx.Node) -> str:
    return str(node.meta.get("task", node))


def _trainers(placements: Mapping[Job, Placement]) -> dict[int, list[int]]:
    """The workers that give the gradients of each stage, by microbatch."""
    split = any(job.direction is Direction.WEIGHT for job in placements)
    gives = Direction.WEIGHT if split else Direction.BACKWARD
    trainers: dict[int, list[int]] = {}
    for job in sorted(
        (job for job in placements if job.direction is gives),
        key=lambda job: job.microbatch,
    ):
        trainers.setdefault(job.stage, []).append(placements[job].compute)
    return trainers
