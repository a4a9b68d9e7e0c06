"""Random inputs of a model, in the ranges that its ints may have."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, fx

from ..ir.graphs import is_mutable, is_view, name_of
from .vocabulary_rules import lookup_of, loss_of

SAME = ("clone", "index", "gather", "getitem", "pad")  # beside views
COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")


def index_ranges(graph: fx.Graph) -> dict[fx.Node, int]:
    """How many values the inputs may have that are nothing but indices: the number of
    rows of the smallest table that they are of; inputs of other ints aren't here."""
    inputs = graph.find_nodes(op="placeholder")
    ranges = {node: _range(node) for node in inputs}
    return {node: size for node, size in ranges.items() if size is not None}


def _range(node: fx.Node) -> int | None:
    fake = node.meta["val"]
    if fake.is_floating_point() or fake.dtype is torch.bool:
        return None
    sizes: list[int] = []
    seen, queue = {node}, [node]
    while queue:
        read = queue.pop()
        for user in read.users:
            size = _size(user, read)
            if size is not None:
                sizes.append(size)
            elif _keeps(user) and user.args[0] is read:
                queue += {user} - seen
                seen.add(user)
            elif name_of(user.target) not in COMPARED:
                return None
    return min(sizes, default=None)


def _keeps(user: fx.Node) -> bool:
    """Whether a node gives some of the numbers that it reads."""
    view = is_view(user.target) and not is_mutable(user.target)
    return view or name_of(user.target) in SAME


def _size(user: fx.Node, read: fx.Node) -> int | None:
    """The rows of a table that a node reads by an index; None if it doesn't."""
    lookup, loss = lookup_of(user), loss_of(user)
    if lookup is not None and lookup.indices is read:
        return int(lookup.weight.meta["val"].shape[0])
    if loss is not None and loss.labels is read:
        return int(loss.logits.meta["val"].shape[1])
    return None


def spread_out(shape: Iterable[int], size: int, generator: torch.Generator) -> Tensor:
    """Numbers below `size` in random order, from all of its ranges."""
    count = torch.Size(shape).numel()
    numbers = torch.arange(count) * max(size // max(count, 1), 1) % size
    return numbers[torch.randperm(count, generator=generator)].reshape(tuple(shape))
