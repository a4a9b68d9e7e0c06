"""Tensor.register_hook in forward, where Dynamo has it as a node of its own.

A hook runs on the gradient of all that read its tensor, those before it too:

before: y = linear(x, w); half = y * 0.5; z = register_hook(y, body); out = z + half
after:  y = linear(x, w); z = register_hook(y, body); half = z * 0.5; out = z + half
"""

from __future__ import annotations

from torch import fx

from ..jobs.job import PlanError
from ..rows.own_backward import HOOK, own_name
from .refusals import where_of


def hook_at_source(gm: fx.GraphModule) -> None:
    """Moves each hook to its tensor, in place.

    Raises PlanError for one that reads what comes later.
    """
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    for node in place:
        if own_name(node) != HOOK:
            continue
        tensor, body, *free = node.args
        others = [user for user in tensor.users if user is not node]
        if not others:
            continue
        if any(isinstance(n, fx.Node) and place[n] > place[tensor] for n in free):
            raise PlanError(
                "a hook on a gradient is added after its tensor was read"
                f"{where_of(node)}"
                "  and what it reads came later; call register_hook right after the "
                "line that makes the tensor"
            )
        tensor.append(node)
        tensor.append(body)
        tensor.replace_all_uses_with(node, lambda user, hook=node: user is not hook)
