"""A verifier of the programs of all workers.

Each program is evaluated by itself on symbols (check_program.py) and held against a
reference that shares no code with what wrote it (reference.py); ranks need no program
but their own. What programs claim of each other's messages is decided here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from torch import fx

from ..ir.graphs import Specs
from .check_program import examine, fault_text
from .reference import Reference
from .summary import CheckError, Claim, End, Summary
from .symbols import RECEIVED, Links, Matcher, Open, is_gradient, terms, text


def check_programs(programs: Sequence[fx.GraphModule], reference: Reference) -> None:
    """Raises CheckError unless the programs are sound.

    Sound: every job runs once, where w says, and calls its own stage, as it was
    planned, with the values that the reference says: weights of its version, its own
    microbatch's values or those of all in their order, what its own F saved or B
    carries, its own seed. Every update, average and result is what the reference says,
    to the order of additions where updates or gradients have one; all owners of a
    gradient add it up in the same order. Every recv has its send, of the same shapes,
    and the other way round; each pair of workers sends and receives in one order; with
    each send and its recv as one event, the programs' orders have no circle, and
    neither do tasks. Every value is there when it is read, none is read once another
    has gone over its memory, and all are freed once. What goes over weights waits for
    the jobs and the copies here that read them, in any order of tasks.
    """
    summaries = [
        examine(rank, program, reference) for rank, program in enumerate(programs)
    ]
    check_summaries(summaries, reference)


def check_summaries(summaries: Sequence[Summary], reference: Reference) -> None:
    """The same for programs of which there are summaries only: one for each, in the
    order of the workers.

    A claim may rest on what a message brings, and that on others: as no message waits
    for itself, each is proved by those before it.
    """
    messages = _match(summaries)
    _check_order(summaries)
    _check_cycle(summaries, messages)
    for summary in summaries:
        if summary.fault is not None:
            raise CheckError(summary.fault)
    _check_claims(summaries, messages, reference)
    _check_memory(summaries, messages)
    _check_tasks(summaries, messages)
    _check_stages(summaries)


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
                f"{_where(source, send)} and {_where(rank, recv)} name different "
                "workers"
            )
        specs = send.specs
        if specs is not recv.specs and _shapes(specs) != _shapes(recv.specs):
            raise CheckError(
                f"{_where(source, send)} sends {_text(specs)}, but "
                f"{_where(rank, recv)} expects {_text(recv.specs)}"
            )
        messages[tag] = Delivery(source, rank, send, recv)
    for tag, (rank, send) in sends.items():
        if tag not in recvs:
            raise CheckError(f"{_where(rank, send)} has no recv")
    return messages


def _shapes(specs: Specs) -> list[tuple[object, ...]]:
    return [(spec.shape, spec.stride, spec.dtype) for spec in specs]


def _text(specs: Specs) -> str:
    return ", ".join(map(str, specs)) or "nothing"


def _check_order(summaries: Sequence[Summary]) -> None:
    tags: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for summary in summaries:
        for end in summary.ends:
            sends, pair = end.what == "send", (summary.rank, end.other)
            each = tags.setdefault(pair if sends else pair[::-1], ([], []))
            each[not sends].append(end.tag)
    for pair, (sent, received) in tags.items():
        for mine, other in zip(sent, received, strict=True):
            if mine != other:
                raise CheckError(
                    f"worker {pair[0]} sends tag {mine} to worker {pair[1]}, which "
                    f"receives tag {other} at that point; the sends and recvs of two "
                    "workers must be in the same order"
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
    try:
        TopologicalSorter(dict(enumerate(after))).prepare()
    except CycleError as error:
        circle: list[int] = error.args[1]
        return circle[:0:-1]
    return []


def _check_claims(
    summaries: Sequence[Summary], messages: Mapping[int, Delivery], reference: Reference
) -> None:
    """What programs say of values that come of other programs is so, and the same
    gradient is added up in the same order wherever it is used."""
    links = Links(
        {tag: message.send.value for tag, message in messages.items()},
        {(g, each.rank): left for each in summaries for g, left in each.left.items()},
    )
    matcher = Matcher(reference.gradient)
    orders: dict[Any, Any] = {}
    for summary in summaries:
        for claim in summary.claims:
            actual, wanted = links.close(claim.actual), links.close(claim.wanted)
            if actual != wanted and not matcher.matches(actual, wanted):
                found = Claim(claim.what, actual, wanted)
                raise CheckError(_fault(summary.rank, found, reference))
            if not is_gradient(wanted):
                continue
            first = orders.setdefault(wanted, actual)
            if first is not actual and first != actual:
                raise CheckError(
                    f"worker {summary.rank}: {claim.what} {text(actual)}, and another "
                    f"owner adds up {text(first)}; all owners must add up in the same "
                    "order, to get the same bits"
                )


def _check_memory(
    summaries: Sequence[Summary], messages: Mapping[int, Delivery]
) -> None:
    """On threads a message is no copy: what goes over its memory at one end comes after
    all that reads it at the other. Weights may be updated where they were read, by jobs
    whose gradients the update is made of."""
    for source, to, send, recv in messages.values():
        if not send.stays and recv.what == "recv":
            raise CheckError(
                f"{_where(source, send)} sends a value that worker {source} overwrites "
                f"later, and {_where(to, recv)} reads it"
            )
        if not recv.stays and not send.last:
            raise CheckError(
                f"worker {to} overwrites the value that {_where(to, recv)} receives, "
                f"and worker {source} reads the value after {_where(source, send)}, or "
                "sends it again"
            )
    for summary in summaries:
        for tag, reader in summary.stays:
            send = messages[tag].send
            while send.stays and isinstance(send.value, Open):
                if send.value.word != RECEIVED:
                    break
                send = messages[send.value.args[0]].send
            if not send.stays:
                raise CheckError(
                    f"worker {summary.rank}: {reader} reads the weights that it got "
                    f"with tag {tag}, and worker {messages[tag].source} may have "
                    "updated them by then; send a copy"
                )


def _fault(rank: int, claim: Claim, reference: Reference) -> str:
    """What is wrong with a claim, once all of it is known."""
    if is_gradient(claim.wanted):
        group = claim.wanted[1]
        wanted = reference.gradient(*claim.wanted[1:])
        jobs, needed = (
            Counter(terms(value[1] if value[:1] == ("cast",) else value))
            for value in (claim.actual, wanted)
        )
        if wanted[:1] == ("terms",):
            needed = Counter(wanted[1:])
        elif wanted[:1] == ("cast",) and wanted[1][:1] == ("terms",):
            needed = Counter(wanted[1][1:])
        wrong = sorted({_job(each) for each in (needed - jobs) + (jobs - needed)})
        if wrong:
            return (
                f"worker {rank} gets a gradient of group {group} in which "
                f"{', '.join(wrong)} is missing or counted twice"
            )
        return (
            f"worker {rank}: the gradient of group {group} adds up "
            f"{text(claim.actual)}; it should be {text(wanted)}"
        )
    return f"worker {rank}: {fault_text(claim)}"


def _job(term: Any) -> str:
    """The job whose gradient a term is."""
    if term[:1] == ("item",) and term[1][:1] == ("job",):
        return str(term[1][1])
    return text(term)


def _check_stages(summaries: Sequence[Summary]) -> None:
    """A stage computes the same on all workers, whatever passes made of it."""
    digests: dict[str, tuple[int, bytes]] = {}
    for summary in summaries:
        for name, digest in summary.stages.items():
            rank, first = digests.setdefault(name, (summary.rank, digest))
            if first != digest:
                raise CheckError(
                    f"a pass changes {name} on worker {summary.rank} otherwise than on "
                    f"worker {rank}; give the same passes on every rank"
                )


def _where(rank: int, end: End) -> str:
    return f"worker {rank}: {end.what}(tag={end.tag}) of {end.task}"
