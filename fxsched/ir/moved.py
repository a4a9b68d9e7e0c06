"""What kind of value a message brings."""

from __future__ import annotations

from enum import Enum

from ..jobs.job import Direction
from . import ops
from .meta import of_call
from .step import JobOutput, Message, Op, Step, Value, Weights


class Moved(Enum):
    """What a message brings."""

    ACTIVATIONS = "activations"  # and their gradients, and what F saved for B
    WEIGHTS = "weights"
    GRADIENTS = "gradients"  # of weights
    OTHER = "other"  # outputs, buffers, credits


MADE: dict[object, Moved] = {  # by what makes it
    **dict.fromkeys((ops.update, ops.renew, ops.take), Moved.WEIGHTS),
    **dict.fromkeys((ops.copy, ops.correct), Moved.WEIGHTS),
    **dict.fromkeys((ops.replica, ops.average), Moved.WEIGHTS),
    **dict.fromkeys((ops.accumulate, ops.reduce, ops.cast, ops.piece), Moved.GRADIENTS),
    ops.add: Moved.ACTIVATIONS,  # gradients of what all microbatches read
    ops.reload: Moved.ACTIVATIONS,
}


def moved(step: Step, value: Value) -> Moved:
    """What a message brings that has a value of this kind."""
    if isinstance(value, JobOutput):
        if "group" not in of_call(value.node):
            return Moved.ACTIVATIONS
        _, direction = step.jobs.kinds[step.maker[value.node]]
        return Moved.OTHER if direction is Direction.FORWARD else Moved.GRADIENTS
    if isinstance(value, (Weights, Message)):
        return Moved.WEIGHTS
    if isinstance(value, Op):
        return MADE.get(value.target, Moved.OTHER)
    return Moved.OTHER
