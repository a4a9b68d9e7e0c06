"""Proves in which order gradients are added, to the association of each addition.

Sums in floating point depend on it: (a + b) + c is not a + (b + c). A sum is written
as a tuple of what is added, one after the other, where what is added may be a sum
itself; what a sum begins with is taken apart, so that (a + b) + c is (a, b, c).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import fx

from ..ir import ops
from ..ir.graphs import original
from ..jobs.job import Job

Sum = Job | int | tuple["Sum", ...] | None  # an int is the tag of a message


def sum_of(
    node: fx.Node,
    receives: Sequence[object],
    maker: Callable[[fx.Node], Job | None],
) -> Sum:
    """What a value adds up: jobs' gradients and messages.

    maker: the job that a value is a part of the result of.
    """
    later: list[Sum] = []
    node = original(node)
    while node.target in (ops.accumulate, ops.reduce, ops.cast):
        first, *others = (arg for arg in node.args if isinstance(arg, fx.Node))
        later += [sum_of(each, receives, maker) for each in reversed(others)]
        node = original(first)
    if node.target in receives:
        tag: int = node.kwargs["tag"]  # type: ignore[assignment]
        return _added([tag, *reversed(later)])
    return _added([maker(node), *reversed(later)])


def with_messages(total: Sum, sent: Callable[[int], Sum]) -> Sum:
    """A sum with what messages bring in the place of their tags."""
    if isinstance(total, Job) or total is None:
        return total
    if isinstance(total, int):
        return with_messages(sent(total), sent)
    return _added([with_messages(each, sent) for each in total])


def order_fault(total: Sum, jobs: Iterable[Job]) -> str | None:
    """What is wrong with a sum of the gradients of these jobs, if it isn't one of
    microbatches 0, 1, .., each the sum of its stages', from the last to the first."""
    by_microbatch: dict[int, list[Job]] = {}
    for job in sorted(jobs, key=lambda job: (job.microbatch, -job.stage)):
        by_microbatch.setdefault(job.microbatch, []).append(job)
    wanted = _added([_added([*each]) for each in by_microbatch.values()])
    if total == wanted:
        return None
    return f"adds up {_text(total)}, and the order of microbatches is {_text(wanted)}"


def _added(parts: Sequence[Sum]) -> Sum:
    first, *others = parts
    if not others:
        return first
    if isinstance(first, tuple) and not isinstance(first, Job):
        return (*first, *others)
    return (first, *others)


def _text(total: Sum) -> str:
    if isinstance(total, tuple) and not isinstance(total, Job):
        return f"({' + '.join(map(_text, total))})"
    return str(total)
