"""Messages between jobs in a type of fewer bytes."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from ..ir.graphs import Specs
from ..ir.message_types import as_sent
from ..ir.request import Request
from ..ir.step_ir import Line, Made, Message, StepIR, values_in


def narrow_messages(step: StepIR, request: Request) -> StepIR:
    """Where request.message_dtype says a type: activations and their gradients travel
    in it.

    before: message 3: a_0 from worker 0 to worker 1                 # float32[4, 8]
    after:  message 3: a_0 from worker 0 to worker 1                 # bfloat16[4, 8]

    step.narrow has the shapes of what is sent. The program casts such a value where it
    is made and back again, and all who read it read that, also on the same worker: an F
    and one that recomputes it elsewhere see the same. What is saved for B, bundles of
    weights or of their gradients, and what others than jobs read (outputs, sums)
    travels as it is.
    """
    if request.message_dtype is None:
        return step
    exact = _read_besides(step)
    narrow: dict[fx.Node, Specs] = {}
    for line in step.lines:
        if not isinstance(line, Message) or not isinstance(line.value, Made):
            continue
        node = line.value.node
        if node in exact or node in narrow or node.meta.get("bundle"):
            continue
        (spec,) = node.meta["specs"]
        sent = as_sent(spec, request.message_dtype)
        if sent is not spec:
            narrow[node] = (sent,)
    return replace(step, narrow=narrow)


def _read_besides(step: StepIR) -> set[fx.Node]:
    """The nodes that lines other than jobs, or the results, read."""
    args = [line.args for line in step.lines if isinstance(line, Line)]
    values = values_in([*args, *step.results.values()])
    return {value.node for value in values if isinstance(value, Made)}
