"""Models on the meta device, which have shapes and no values: planned as on the CPU.

AOTAutograd drops gradients of some operations there (nll_loss, in PyTorch 2.13), and
nothing is known of the device that the model will be on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..ir.graphs import Spec
from ..ir.rewrites import rewritten
from ..jobs.job import PlanError

CPU = torch.device("cpu")


def is_meta(inputs: Sequence[Any]) -> bool:
    """Whether any input has no values."""
    return any(isinstance(value, Tensor) and value.is_meta for value in inputs)


def cpu_specs(inputs: Sequence[Any]) -> dict[int, Spec]:
    """What inputs without values would be on the CPU, by index."""
    return {
        i: Spec.of(value)._replace(device=CPU)
        for i, value in enumerate(inputs)
        if isinstance(value, Tensor) and value.is_meta
    }


def on_cpu(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph for the CPU.

    before: mask = torch.arange(4, device=device("meta"))
    after:  mask = torch.arange(4, device=device("cpu"))
    """

    def write(node: fx.Node) -> fx.Node:
        node.args = fx.node.map_aggregate(node.args, _off_meta)
        node.kwargs = fx.node.map_aggregate(node.kwargs, _off_meta)
        return node

    result = rewritten(gm, write)
    for node in result.graph.find_nodes(op="get_attr"):
        value = getattr(result, str(node.target), None)
        if isinstance(value, Tensor) and value.is_meta:
            setattr(result, str(node.target), torch.zeros_like(value, device=CPU))
    return result


def _off_meta(value: Any) -> Any:
    named = isinstance(value, str) and value == "meta"
    return CPU if named or value == torch.device("meta") else value


def refuse_meta(inputs: Sequence[Any], what: str, instead: str) -> None:
    """Raises PlanError for inputs without values: what can't be done, and what can."""
    if is_meta(inputs):
        raise PlanError(
            f"the model or its inputs are on the meta device and have no values to "
            f"{what} with; {instead}, and model.to_empty(device=...) gives it memory"
        )
