"""What workers send each other in a step, counted on its messages."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..ir import ops
from ..ir.garbage import no_collection
from ..ir.moved import Moved, moved
from ..ir.step import Message, Step, Value, values_in


@dataclass
class Traffic:
    """What one worker sends and receives in a step.

    sent, received: bytes of all messages.
    activations_sent, activations_received: messages with what jobs make for jobs.
    fetches: weights that others keep and its jobs read.
    returned: sums of gradients that it sends to the worker that adds them up.
    renewed: copies of weights that get new ones from another worker.
    parameters: bytes of weights, and of gradients of them, that it receives.
    """

    sent: int = 0
    received: int = 0
    activations_sent: int = 0
    activations_received: int = 0
    fetches: int = 0
    returned: int = 0
    renewed: int = 0
    parameters: int = 0


@no_collection()
def traffic(step: Step) -> list[Traffic]:
    """What each worker sends and receives."""
    found = [Traffic() for _ in range(step.jobs.workers)]
    summed, new = set[tuple[Value, int]](), set[Value]()
    for op in step.ops:
        if op.target in (ops.reduce, ops.all_reduce):
            summed.update((value, op.worker) for value in values_in(op.args))
        elif op.target is ops.renew:
            new.update(values_in(op.args))
            found[op.worker].renewed += 1
        elif op.target is ops.take:  # of a replica, in the place of which is the mean
            mean = op.args[3]
            found[op.worker].renewed += mean.worker != op.worker
    for line in step.lines:
        if not isinstance(line, Message):
            continue
        source, to, what = found[line.source], found[line.to], moved(step, line.value)
        source.sent += line.bytes
        to.received += line.bytes
        if what is Moved.ACTIVATIONS:
            source.activations_sent += 1
            to.activations_received += 1
        if what in (Moved.WEIGHTS, Moved.GRADIENTS):
            to.parameters += line.bytes
        to.fetches += line.fetches and line not in new
        is_sum = what is Moved.GRADIENTS and (line.value, line.to) in summed
        source.returned += is_sum
    return found


def sent_between(step: Step) -> dict[tuple[int, int], int]:
    """Bytes that workers send each other, by sender and receiver."""
    sent: Counter[tuple[int, int]] = Counter()
    for line in step.lines:
        if isinstance(line, Message):
            sent[line.source, line.to] += line.bytes
    return dict(sorted(sent.items()))
