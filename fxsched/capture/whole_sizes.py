"""Operations that don't go with the size of a microbatch, for rows of the batch meet in
them: of x.topk(4, 0) or x[3] a microbatch of two rows has nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from ..ir.graphs import name_of, tensors
from ..ir.written import written
from ..rows.kinds import Cause, Effect, Kind, Rows
from ..rows.tracker import Tracker
from .batch import Batch


def has_sizes(value: Any, example: Any, batch: Batch) -> bool:
    """Whether a microbatch's value has the sizes that Dynamo's symbols say."""
    found, wanted = list(tensors(value)), list(tensors(example))
    if len(found) != len(wanted):
        return not wanted  # of an operation of ours Dynamo knows nothing
    return all(
        size in (part, None)
        for a, b in zip(found, wanted, strict=True)
        for part, size in zip(a.shape, map(batch.part_of, b.shape), strict=False)
    )


def stand_ins(
    node: fx.Node, batch: Batch, tracker: Tracker, values: Mapping[fx.Node, Any]
) -> Any:
    """Values of the sizes that the symbols say, in place of what a microbatch can't
    compute; None if some are not known.

    values: of the microbatch.
    """
    cause = _cause(node)
    example = node.meta.get("example_value")
    shapes = [list(map(batch.part_of, each.shape)) for each in tensors(example)]
    if not shapes or any(None in shape for shape in shapes):
        return None
    if name_of(node.target) == "batch_norm" and "norm" not in node.meta:
        return None  # it is of each microbatch
    read = tensors([values.get(each) for each in node.all_input_nodes])
    learned = [t.as_strided((), ()) for t in read if t.requires_grad]

    def made(value: Any) -> Any:
        if not isinstance(value, Tensor):
            known = isinstance(value, torch.SymInt)
            return batch.part_of(value) if known else value
        shape: Any = tuple(map(batch.part_of, value.shape))
        new = torch.empty(shape, dtype=value.dtype, device=value.device)
        if value.is_floating_point():  # its gradient reaches what the node reads
            new = sum((each.to(value.dtype) for each in learned), new)
        tracker.put(new, Rows(Kind.OTHER, cause=cause))
        return new

    return tree_map(made, example)


def _cause(node: fx.Node) -> Cause:
    target = node.args[0] if node.target is written else node.target
    return Cause(Effect.ORDER, name_of(target), node.meta.get("stack_trace"))
