"""Joint jobs read all microbatches in the order of their rows, and give each its own.

What a joint job reads of microbatches comes in runs, one value of each, in the order of
the batch; so do the results of which microbatches read their rows. Where a microbatch
stands in one run it stands in all, or it would get another's rows. A result that all
microbatches read as it is gets all their gradients, each once.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx

from ..ir import ops
from ..ir.graphs import arguments
from ..jobs.job import Direction, Job

FORWARD = Direction.FORWARD
INPUTS = 1  # the place of what F reads, among a call's arguments; B's has it one later

JobPart = tuple[Job, int]  # a job, and which of its results


class Rows(NamedTuple):
    """What a value was made from.

    microbatches: of jobs and inputs on its worker. parts: results of jobs there, if
    some are joint, as often as they went into it. received: tags of messages, as often.
    """

    microbatches: frozenset[int]
    parts: tuple[JobPart, ...]
    received: tuple[int, ...]


class JointUse(NamedTuple):
    """A value that a joint job reads, or that may be of one.

    place: which of the job's arguments, and which value of it.
    """

    rank: int
    job: Job
    place: tuple[int, int]
    name: str
    rows: Rows


def rows_of(value: fx.Node, receives: Sequence[object], joins: bool) -> Rows:
    """What a value in a program was made from.

    receives: functions that get messages. joins: whether there are joint jobs.
    """
    microbatches: set[int] = set()
    parts: list[JobPart] = []
    received: list[int] = []
    open_ends = [value]
    while open_ends:
        node = open_ends.pop()
        job = _made_by(node) if joins else None
        if job is not None:
            parts.append((job, arguments(node)[1]))
        if job is not None and job.joint:
            continue
        if "job" in node.meta:
            if not node.meta["job"].joint:
                microbatches.add(node.meta["job"].microbatch)
        elif node.target is ops.rows:
            microbatches.add(arguments(node)[1])
        elif node.target in receives:
            tag: Any = node.kwargs["tag"]
            received.append(tag)
        elif node.target is ops.add:  # which may add a value to itself
            open_ends += [a for a in node.args if isinstance(a, fx.Node)]
        elif node.target is not ops.pause:
            open_ends += node.all_input_nodes
    return Rows(frozenset(microbatches), tuple(parts), tuple(received))


def _made_by(node: fx.Node) -> Job | None:
    """The job that a node is one result of."""
    if node.target is not operator.getitem:
        return None
    call = node.args[0]
    return call.meta.get("job") if isinstance(call, fx.Node) else None


def joint_uses(
    rank: int, calls: Iterable[fx.Node], receives: Sequence[object]
) -> Iterator[JointUse]:
    """What calls of jobs read, besides weights and what is kept for them."""
    for call in calls:
        for position, values in enumerate(call.args[1:], 1):
            for i, value in enumerate(values if isinstance(values, tuple) else ()):
                if isinstance(value, fx.Node):
                    rows = rows_of(value, receives, True)
                    job: Job = call.meta["job"]
                    yield JointUse(rank, job, (position, i), value.name, rows)


def unread(nodes: Iterable[fx.Node], receives: Sequence[object]) -> str | None:
    """A gradient, a sum, or what came with a message, that nothing in a program reads;
    None if there is none."""
    for node in nodes:
        job = _made_by(node)
        gradient = job is not None and job.direction is Direction.BACKWARD
        gradient |= node.target is ops.add
        used = any(user.target is not ops.free for user in node.users)
        if (gradient or node.target in receives) and not used:
            return f"{node.meta['task']}: {node.name} is read by nothing"
    return None


def joint_fault(uses: Sequence[JointUse], microbatches: int) -> str | None:
    """What is wrong with what joint jobs read, or with what is read of them; None if
    nothing is. uses: of all workers, with what came with messages."""
    reads: dict[tuple[Job, int], list[JointUse]] = {}
    gives: dict[tuple[Job, object], dict[int, tuple[int, JointUse]]] = {}
    for use in uses:
        if use.job.joint:
            reads.setdefault((use.job, use.place[0]), []).append(use)
            continue
        joint = [part for part in use.rows.parts if part[0].joint]
        for job, result in sorted(joint, key=str):
            kind = use.job.stage, use.job.direction, use.place
            gives.setdefault((job, kind), {})[use.job.microbatch] = result, use
    again = {key: reads.pop(key) for key in list(reads) if _reads_again(*key)}
    faults = [
        *(_sum_fault(use, microbatches) for each in reads.values() for use in each),
        *(_read_fault(each, microbatches) for each in reads.values()),
        *(
            _again_fault(each, reads.get((job._replace(direction=FORWARD), INPUTS), []))
            for (job, _), each in again.items()
        ),
        _given_fault(gives),
        _other_fault(use for use in uses if not use.job.joint),
    ]
    return next(filter(None, faults), None)


def _reads_again(job: Job, position: int) -> bool:
    """Whether an argument has what F read, as far as B needs it."""
    return job.direction is Direction.BACKWARD and position == INPUTS + 1


def _again_fault(uses: Sequence[JointUse], before: Sequence[JointUse]) -> str | None:
    """B reads at each place what F read there."""
    wanted = {use.place[1]: use.rows.microbatches for use in before}
    for use in uses:
        if use.rows.microbatches != wanted.get(use.place[1], frozenset()):
            return (
                f"worker {use.rank}: {use.job} reads {use.name}, of microbatch "
                f"{_text(use.rows.microbatches)}, which F did not read there"
            )
    return None


def _read_fault(uses: Sequence[JointUse], microbatches: int) -> str | None:
    """Values of microbatches come in whole runs, in the order of the batch; beside
    these there are sums over all of them."""
    last = -1, -1  # the place and the microbatch of the value before
    parts = [use for use in uses if use.rows.microbatches and not _sums_all(use)]
    for use in parts:
        wanted = (last[1] + 1) % microbatches
        beside = not wanted or use.place[1] == last[0] + 1
        if use.rows.microbatches != {wanted} or not beside:
            return (
                f"worker {use.rank}: {use.job} reads {use.name}, of microbatch "
                f"{_text(use.rows.microbatches)}, where that of {wanted} belongs"
            )
        last = use.place[1], wanted
    if last[1] % microbatches != microbatches - 1 and last[1] >= 0:
        use = uses[-1]
        return (
            f"worker {use.rank}: {use.job} reads nothing of microbatch {last[1] + 1} "
            f"after {use.name}"
        )
    return None


def _sums_all(use: JointUse) -> bool:
    """Whether a value adds up gradients of several microbatches."""
    return len(use.rows.microbatches) > 1


def _sum_fault(use: JointUse, microbatches: int) -> str | None:
    """What all microbatches read gets the gradient of each, once."""
    if not _sums_all(use):
        return None
    added = Counter(use.rows.parts)
    for job, result in sorted(added, key=str):
        numbers = [job.microbatch] if job.joint else range(microbatches)
        for each in (job._replace(microbatch=b) for b in numbers):
            if added[each, result] != 1:
                return (
                    f"worker {use.rank}: {use.job} reads {use.name}, in which the "
                    f"gradient that {each} gives is missing or counted twice"
                )
    return None


def _given_fault(
    gives: Mapping[tuple[Job, object], Mapping[int, tuple[int, JointUse]]],
) -> str | None:
    """Microbatches read the results of a run in its order, or all read one."""
    runs: dict[tuple[Job, int], int] = {}  # where the run of a result begins
    shared = []
    for (job, _), by_microbatch in gives.items():
        results = [result for _, (result, _) in sorted(by_microbatch.items())]
        first, use = by_microbatch[min(by_microbatch)]
        if len(results) > 1 and set(results) == {first}:
            shared.append((job, first, use))
            continue
        begin = first - min(by_microbatch)
        if results != [begin + b for b in sorted(by_microbatch)]:
            text = ", ".join(map(str, results))
            return (
                f"worker {use.rank}: {use.name} of {use.job}, and what its stage reads "
                f"there in other microbatches, are results {text} of {job}, not the "
                "rows of each in their order"
            )
        for result in results:
            if runs.setdefault((job, result), begin) != begin:
                return _overlap(use, job, result)
    for job, result, use in shared:
        if (job, result) in runs:
            return _overlap(use, job, result)
    return None


def _other_fault(uses: Iterable[JointUse]) -> str | None:
    """B of a microbatch reads the result of a joint job that its F read there."""
    read: dict[tuple[Job, int], set[JobPart]] = {}
    again = []
    for use in uses:
        results = {part for part in use.rows.parts if part[0].joint}
        if use.job.direction is FORWARD and use.place[0] == INPUTS:
            read[use.job, use.place[1]] = results
        elif results and _reads_again(use.job, use.place[0]):
            again.append((use, results))
    for use, results in again:
        before = read.get((use.job._replace(direction=FORWARD), use.place[1]))
        if results != before:
            job, result = min(results, key=str)
            return (
                f"worker {use.rank}: {use.job} reads {use.name}, result {result} of "
                f"{job}, which F did not read there"
            )
    return None


def _overlap(use: JointUse, job: Job, result: int) -> str:
    return (
        f"worker {use.rank}: {use.job} reads {use.name}, result {result} of {job}, "
        "which is that of another microbatch elsewhere"
    )


def _text(microbatches: Iterable[int]) -> str:
    return "+".join(map(str, sorted(microbatches)))
