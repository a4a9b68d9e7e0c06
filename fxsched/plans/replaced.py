"""What is in the place of values: what is rounded on its way, and what passes of the
user's put there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import fx

from ..checker.reference import Reference
from ..draw.tables import byte_text
from ..ir.graphs import name_of
from ..ir.meta import of_call
from ..ir.moved import moved
from ..ir.step import Message, Step


def replaced_text(
    programs: Sequence[fx.GraphModule], reference: Reference
) -> Iterator[str]:
    """A line of the values that passes say they replace, by the function that makes
    what is in their place, and one of stages; none where there are none."""
    values: Counter[str] = Counter()
    stages: dict[str, None] = {}
    for program in programs:
        for node in program.graph.nodes:
            if "job" in of_call(node) and node.op == "call_module":
                name = str(node.target)
                if name not in stages and not reference.is_planned(program, name):
                    stages[name] = None
            elif "replaces" in of_call(node):
                values[name_of(node.target)] += 1
    if values:
        each = ", ".join(f"{n} by {name}" for name, n in sorted(values.items()))
        yield f"passes replace values: {each}"
    if stages:
        yield f"passes replace stages: {', '.join(sorted(stages))}"


def rounded_text(step: Step) -> Iterator[str]:
    """A line of the values that travel in fewer bytes; none where there are none."""
    sent, exact = Counter[str](), Counter[str]()
    for line in step.lines:
        if isinstance(line, Message) and line.codes is not None:
            kind = moved(step, line.value).value
            sent[kind] += line.bytes
            exact[kind] += sum(spec.bytes for spec in step.specs(line.value)[0])
    each = (
        f"{kind}, {byte_text(size)} for {byte_text(exact[kind])}"
        for kind, size in sent.items()
    )
    if sent:
        yield f"encode= rounds what workers send: {'; '.join(each)}"
