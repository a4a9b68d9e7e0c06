"""A verifier of the programs of all workers.

It reads nothing but finished programs and the schedule's placements. It proves that
running them cannot deadlock, read what isn't there, or lose a gradient. Each program is
examined by itself (check_program.py), so that ranks need no more than their own, and
what the programs say of their messages is held against each other here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from torch import fx

from ..ir.graphs import Group, Specs
from ..jobs.job import Job, Placement
from .check_averages import Part, Source, average_fault
from .check_joint import JobPart, Rows, joint_fault
from .check_order import Sum, order_fault, with_messages
from .check_program import NO_UPDATES, examine, other_maker, other_microbatch
from .check_updates import Updates
from .summary import CheckError, End, Provenance, Summary


def check_programs(
    programs: Sequence[fx.GraphModule],
    placements: Mapping[Job, Placement],
    groups: Sequence[Group],
    updates: Updates = NO_UPDATES,
) -> None:
    """Raises CheckError unless the programs are sound.

    Sound: every job runs once, where w says; every recv has its send, of the same
    shapes, and the other way round; each pair of workers sends and receives in one
    order; with each send and its recv as one event, the programs' orders have no
    circle, and neither do tasks; a job calls its own stage, and reads values of its own
    microbatch, or of all in their order, and its own rows of what is made from all, and
    what its own F saved or B carries; every value is there when it is
    read, and freed once; the gradient of every parameter holds every B (or W) of every
    microbatch once, and reaches all its owners; where updates.in_order, added up in
    the order of microbatches. Where there are updates: each has the
    gradients since the one before it, runs once on each worker that it should, in their
    order, and each job reads the weights that the updates before its microbatch left.
    """
    check_summaries(
        [
            examine(rank, program, placements, groups, updates)
            for rank, program in enumerate(programs)
        ]
    )


def check_summaries(summaries: Sequence[Summary]) -> None:
    """The same for programs of which there are summaries only: one for each, in the
    order of the workers."""
    messages = _match(summaries)
    _check_order(summaries)
    _check_cycle(summaries, messages)
    for summary in summaries:
        if summary.fault is not None:
            raise CheckError(summary.fault)
    origins = _Provenances(summaries, messages)
    origins.check_uses()
    origins.check_joint()
    _check_tasks(summaries, messages)
    origins.check_gradients()
    origins.check_weights()
    origins.check_averages()


class Delivery(NamedTuple):
    """A send and its recv, and the workers that they belong to."""

    source: int
    to: int
    send: End
    recv: End


def _match(summaries: Sequence[Summary]) -> dict[int, Delivery]:
    """Messages by tag; raises if a send or a recv is alone or they disagree."""
    sends: dict[int, tuple[int, End]] = {}
    recvs: dict[int, tuple[int, End]] = {}
    for summary in summaries:
        rank = summary.rank
        for end in summary.ends:
            side = sends if end.what == "send" else recvs
            if end.tag in side:
                raise CheckError(f"tag {end.tag} is used twice: {_where(rank, end)}")
            side[end.tag] = (rank, end)
    messages = {}
    for tag, (rank, recv) in recvs.items():
        if tag not in sends:
            raise CheckError(f"{_where(rank, recv)} has no send")
        source, send = sends[tag]
        if recv.other != source or send.other != rank:
            raise CheckError(
                f"{_where(source, send)} and {_where(rank, recv)} name other workers"
            )
        specs = summaries[source].origins[send.origin].specs
        if specs is not recv.specs and _shapes(specs) != _shapes(recv.specs):
            raise CheckError(
                f"{_where(source, send)} sends {_text(specs)}, but "
                f"{_where(rank, recv)} expects {_text(recv.specs)}"
            )
        messages[tag] = Delivery(source, rank, send, recv)
        if (
            recv.what == "fetch"
            and summaries[source].origins[send.origin].weights is None
        ):
            raise CheckError(
                f"{_where(source, send)} sends no weights, but {_where(rank, recv)} "
                "wants some"
            )
    for tag, (rank, send) in sends.items():
        if tag not in recvs:
            raise CheckError(f"{_where(rank, send)} has no recv")
    return messages


def _shapes(specs: Specs) -> list[tuple[object, ...]]:
    return [(spec.shape, spec.stride, spec.dtype) for spec in specs]


def _text(specs: Specs) -> str:
    return ", ".join(map(str, specs)) or "nothing"


def _check_order(summaries: Sequence[Summary]) -> None:
    sent: dict[tuple[int, int], list[int]] = {}
    received: dict[tuple[int, int], list[int]] = {}
    for summary in summaries:
        for end in summary.ends:
            if end.what == "send":
                sent.setdefault((summary.rank, end.other), []).append(end.tag)
            else:
                received.setdefault((end.other, summary.rank), []).append(end.tag)
    for pair, tags in sent.items():
        for mine, other in zip(tags, received[pair], strict=True):
            if mine != other:
                raise CheckError(
                    f"worker {pair[0]} sends tag {mine} to worker {pair[1]} where that "
                    f"receives tag {other}; sends and recvs of a pair must be in one "
                    "order"
                )


def _check_cycle(
    summaries: Sequence[Summary], messages: Mapping[int, Delivery]
) -> None:
    """Each send-recv pair is one event of both programs: no circle in the orders."""
    number = {tag: i for i, tag in enumerate(messages)}
    after: list[list[int]] = [[] for _ in messages]
    for summary in summaries:
        events = [number[end.tag] for end in summary.ends]
        for event, following in pairwise(events):
            after[event].append(following)
    tags = list(messages)
    steps = [
        f"  {_where(message.source, message.send)} with "
        f"{_where(message.to, message.recv)}"
        for message in (messages[tags[event]] for event in _circle(after))
    ]
    if steps:
        raise CheckError(
            "the programs wait for each other in a circle:\n" + "\n".join(steps)
        )


def _check_tasks(
    summaries: Sequence[Summary], messages: Mapping[int, Delivery]
) -> None:
    """The same for whole tasks, because one starts once all that it reads is there."""
    tasks = [(task, each.rank) for each in summaries for task in each.tasks]
    first = [0, *accumulate(len(each.tasks) for each in summaries)]
    after: list[list[int]] = [[] for _ in tasks]
    for start, end in pairwise(first):
        for task in range(start, end - 1):
            after[task].append(task + 1)
    for summary in summaries:
        for task, tag in summary.waits:
            message = messages[tag]
            sender = first[message.source] + message.send.position
            after[sender].append(first[summary.rank] + task)
    circles = [
        [(task, each.rank) for task in each.circle] for each in summaries if each.circle
    ] + [[tasks[task] for task in _circle(after)]]
    for circle in filter(None, circles):
        text = ", ".join(f"{task} on worker {rank}" for task, rank in circle)
        raise CheckError(f"tasks wait for each other in a circle: {text}")


def _circle(after: Sequence[Sequence[int]]) -> list[int]:
    """A circle in a graph, given by what follows each of its points; [] if none."""
    missing = [0] * len(after)
    for following in after:
        for point in following:
            missing[point] += 1
    ready = [point for point, count in enumerate(missing) if not count]
    for done in ready:
        for point in after[done]:
            missing[point] -= 1
            if not missing[point]:
                ready.append(point)
    left = set(range(len(after))).difference(ready)
    before = {to: point for point in sorted(left) for to in after[point]}
    path: dict[int, None] = {}
    point = min(left, default=-1)
    while left and point not in path:
        path[point] = None
        point = before[point]  # what is left waits for something that is left
    walked = list(path)
    return walked[walked.index(point) :][::-1] if left else []


class _Provenances:
    """Follows values back through messages to the jobs that made them."""

    def __init__(
        self, summaries: Sequence[Summary], messages: Mapping[int, Delivery]
    ) -> None:
        self.summaries, self.messages = summaries, messages
        self.microbatches: dict[int, frozenset[int]] = {}  # by tag
        self.sums: dict[tuple[int, int], Counter[Job] | None] = {}

    def check_uses(self) -> None:
        """Received values that a job reads are of its microbatch and, if kept for it
        by an earlier job, made by that."""
        uses = [(each.rank, use) for each in self.summaries for use in each.uses]
        for rank, (job, name, tag, _) in uses:
            others = self._microbatches(tag) - {job.microbatch}
            if others and not job.joint:
                raise CheckError(other_microbatch(rank, job, name, others))
        for rank, (job, name, tag, wanted) in uses:
            maker = None if wanted is None else self._maker(tag)
            if wanted is not None and maker != wanted:
                raise CheckError(other_maker(rank, job, name, maker, wanted))

    def check_joint(self) -> None:
        """Joint jobs read every microbatch once, in the order of the rows, and each
        microbatch reads its own rows of what they make."""
        uses = [
            use._replace(rows=self._whole(use.rows))
            for each in self.summaries
            for use in each.joint_uses
        ]
        count = max((each.microbatches for each in self.summaries), default=1)
        if fault := joint_fault(uses, count):
            raise CheckError(fault)
        for each in self.summaries:
            if each.unread is not None:
                raise CheckError(f"worker {each.rank}: {each.unread}")

    def _whole(self, rows: Rows) -> Rows:
        """With what came with messages."""
        more = map(self._microbatches, rows.received)
        parts = (*rows.parts, *self._more(rows.received))
        return Rows(rows.microbatches.union(*more), parts, ())

    def _more(self, tags: Iterable[int]) -> Iterator[JobPart]:
        return (part for tag in tags for part in self._parts(tag))

    def _parts(self, tag: int) -> tuple[JobPart, ...]:
        """The results of jobs that a message was made from."""
        origin = self._origin(tag)
        return *origin.parts, *self._more(origin.received)

    def _origin(self, tag: int) -> Provenance:
        message = self.messages[tag]
        return self.summaries[message.source].origins[message.send.origin]

    def _maker(self, tag: int) -> Job | None:
        origin = self._origin(tag)
        while origin.forwards is not None:
            origin = self._origin(origin.forwards)
        return origin.maker

    def _microbatches(self, tag: int) -> frozenset[int]:
        if tag not in self.microbatches:
            origin = self._origin(tag)
            more = map(self._microbatches, origin.received)
            self.microbatches[tag] = frozenset(origin.microbatches).union(*more)
        return self.microbatches[tag]

    def check_gradients(self) -> None:
        """Each worker's gradient holds what all workers' jobs give, once."""
        owed: dict[int, Counter[Job]] = {}
        for summary in self.summaries:
            for group, jobs in summary.gradients.items():
                owed.setdefault(group, Counter()).update(jobs)
        for summary in self.summaries:
            for group, origin in summary.returns.items():
                wanted = owed.get(group, Counter())
                self._check_sum(summary.rank, group, origin, wanted)
            for update, group, origin in summary.updates:
                first = update.microbatch - (summary.every or 1)
                given = owed.get(group, Counter())
                if summary.alone:
                    given = Counter(summary.gradients.get(group, ()))
                wanted = Counter(
                    job
                    for job in given.elements()
                    if first < job.microbatch <= update.microbatch
                )
                self._check_sum(summary.rank, group, origin, wanted)

    def _check_sum(
        self, rank: int, group: int, origin: int, wanted: Counter[Job]
    ) -> None:
        """Raises CheckError unless an origin adds up the gradients of these jobs."""
        total = self._sum(rank, origin)
        if total != wanted:
            total = total or Counter()
            wrong = sorted((wanted - total) + (total - wanted))
            raise CheckError(
                f"worker {rank} gets a gradient of group {group} in which "
                f"{', '.join(map(str, wrong))} is missing or counted twice"
            )
        if self.summaries[rank].in_order:
            order = with_messages(self._total(rank, origin), self._sent)
            if fault := order_fault(order, wanted):
                raise CheckError(
                    f"worker {rank}: the gradient of group {group} {fault}"
                )

    def _total(self, rank: int, origin: int) -> Sum:
        return self.summaries[rank].origins[origin].total

    def _sent(self, tag: int) -> Sum:
        return self._origin(tag).total

    def check_averages(self) -> None:
        """Each average is of all replicas, at the same version, each once."""
        for summary in self.summaries:
            here = summary.rank

            def resolve(source: Source | None) -> tuple[int, Part | None]:
                if not isinstance(source, int):
                    return here, source  # noqa: B023  # called at once
                return self.messages[source].source, self._origin(source).part

            for each in summary.averaged:
                fault = average_fault(here, each, resolve)
                if fault is not None:
                    raise CheckError(fault)

    def check_weights(self) -> None:
        """Weights that came with messages are of the version that is wanted."""
        for summary in self.summaries:
            for task, group, tag, version, stale, gap in summary.weight_uses:
                sent = self._origin(tag).weights
                wanted = [(group, version, copied, gap) for copied in (True, stale)]
                if sent not in wanted:
                    raise CheckError(
                        f"worker {summary.rank}: {task} wants version {version} of "
                        f"group {group}, {gap:g} velocities away, and gets {sent}"
                    )

    def _sum(self, rank: int, number: int) -> Counter[Job] | None:
        """The jobs whose gradients an origin adds up; None if it isn't such a sum."""
        if (rank, number) not in self.sums:
            origin = self.summaries[rank].origins[number]
            jobs = None if origin.adds is None else Counter(origin.adds)
            for tag in origin.added:
                message = self.messages[tag]
                more = self._sum(message.source, message.send.origin)
                jobs = None if jobs is None or more is None else jobs + more
            self.sums[rank, number] = jobs
        return self.sums[rank, number]


def _where(rank: int, end: End) -> str:
    return f"worker {rank}: {end.what}(tag={end.tag}) of {end.task}"
