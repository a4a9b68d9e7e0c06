"""What a forward writes into its weights before it reads them happens before the step.

before: data = w.data; data.clamp_(0, 4.6); y = x * w.exp()
after:  y = x * w.exp()                           # and w.clamp_(0, 4.6) in each call

Each microbatch would do so with a copy of the weight; eager PyTorch does so once.
"""

from __future__ import annotations

from torch import fx

from ..ir.graphs import ancestors
from ..ir.rewrites import extracted
from ..rows.early_values import Early
from .functional import COPY, is_weight
from .graph_inputs import placeholders

EARLY = "early"  # gm.meta: the writes into weights


def early_writes(gm: fx.GraphModule) -> tuple[Early, ...]:
    """Those that were taken out of a graph; each reads a weight, and writes into it."""
    found: tuple[Early, ...] = gm.meta.get(EARLY, ())
    return found


def take_early_writes(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph, without what writes into weights before anything else reads them.

    What is written must come of that weight alone. Other writes stay, and are errors.
    """
    writes = []
    for i, weight in enumerate(placeholders(gm)):
        ends = [n for n in weight.users if n.target is COPY and n.args[0] is weight]
        if ends and is_weight(weight):
            nodes = sorted(ancestors(ends[0].all_input_nodes[1:]))
            apart = all(n.op == "call_function" for n in nodes if n is not weight)
            later = {user for n in nodes[:-1] for user in n.users} - {*nodes, *ends}
            if apart and not later:
                alone = extracted(gm, [weight], [*nodes[1:], ends[0]], [])
                writes.append(Early(alone, (i,)))
                for node in (ends[0], *reversed(nodes[1:])):
                    node.replace_all_uses_with(weight)
                    gm.graph.erase_node(node)
    gm.meta[EARLY] = tuple(writes)
    return gm
