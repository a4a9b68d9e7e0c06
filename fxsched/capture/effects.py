"""What an operation writes into, by its schema."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..ir.graphs import name_of, named_arguments, written_arguments
from ..ir.meta import of_node
from ..jobs.job import PlanError
from .refusals import where_of

NORMS = {"batch_norm": "training", "instance_norm": "use_input_stats"}
STATISTICS = ("running_mean", "running_var")


def targets_of(node: fx.Node) -> dict[str, Any]:
    """What a node writes into, by the argument's name: nodes, and lists of them; the
    statistics of a normalization only if it runs once."""
    target: Any = node.target
    if "once" in node.meta and name_of(target) in NORMS:
        named = named_arguments(node)
        return {name: named[name] for name in STATISTICS if named[name] is not None}
    views = torch.Tag.inplace_view in getattr(target, "tags", ())
    return {} if views else written_arguments(node)


def written_by(node: fx.Node) -> list[fx.Node]:
    """What a node writes into, by its schema."""
    found: list[fx.Node] = []
    fx.map_arg(list(targets_of(node).values()), found.append)
    return found


def statistics_of(node: fx.Node) -> list[fx.Node]:
    """The running statistics that a normalization in training moves, which its schema
    doesn't say."""
    name = name_of(node.target)
    if node.op != "call_function" or name not in NORMS:
        return []
    named = named_arguments(node)
    moved = [named[each] for each in STATISTICS if named[each] is not None]
    return moved if named[NORMS[name]] else []


def refuse_recomputed(node: fx.Node) -> None:
    """Raises PlanError for a node in a checkpoint that writes into a buffer."""
    if "recompute" in of_node(node):
        raise PlanError(
            f"a buffer is written inside torch.utils.checkpoint{where_of(node)}\n"
            "eager PyTorch writes the buffer twice: in F, and when F is repeated in "
            "B; move BatchNorm, or the line that writes, out of the checkpoint"
        )
