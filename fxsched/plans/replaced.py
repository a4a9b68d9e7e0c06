"""What passes of the user's put in the place of values and of stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import fx

from ..checker.reference import Reference
from ..ir import ops
from ..ir.graphs import name_of
from ..ir.meta import of_call


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
                parts = node.all_input_nodes if node.target is ops.bundle else [node]
                values.update({name_of(part.target) for part in parts})
    if values:
        each = ", ".join(f"{n} by {name}" for name, n in sorted(values.items()))
        yield f"passes replace values: {each}"
    if stages:
        yield f"passes replace stages: {', '.join(sorted(stages))}"
