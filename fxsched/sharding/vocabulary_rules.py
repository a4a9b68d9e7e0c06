"""Rules for vocabularies in parts: tables that are read by index, and losses of logits.

Other rules are of the operations that run; these are of the calls in the model, which
become others on shards (vocabulary_parts.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from ..ir.graphs import Call, named_arguments
from ..rows.kinds import Kind, Rows

aten = torch.ops.aten
REDUCTIONS = ("none", "mean", "sum")  # as ATen numbers them
Known = Mapping[fx.Node, tuple[Rows, ...]]


class Lookup(NamedTuple):
    """An embedding: of indices [..] in a weight [rows, width]."""

    indices: fx.Node
    weight: fx.Node
    padding_idx: int | None


class ClassLoss(NamedTuple):
    """A cross entropy: of logits [n, classes, ..] and labels [n, ..], which are numbers
    of classes."""

    logits: fx.Node
    labels: fx.Node
    weight: fx.Node | None
    reduction: str
    ignore_index: int
    label_smoothing: float


def lookup_of(call: Call) -> Lookup | None:
    """The embedding that a call is, if parts of its weight can be read by index."""
    if call.target is not aten.embedding.default:
        return None
    weight, indices, padding, by_count, sparse = named_arguments(call).values()
    if by_count or sparse or not _are_nodes(weight, indices):
        return None
    return Lookup(indices, weight, None if padding < 0 else padding)


def loss_of(call: Call) -> ClassLoss | None:
    """The cross entropy that a call is, if it is one of labels."""
    if call.target is not aten.cross_entropy_loss.default:
        return None
    logits, labels, weight, reduction, *settings = named_arguments(call).values()
    if not _are_nodes(logits, labels):
        return None
    values, numbers = logits.meta["val"], labels.meta["val"]
    if numbers.is_floating_point() or values.dim() != numbers.dim() + 1:
        return None
    if values.dim() < 2:
        return None
    return ClassLoss(logits, labels, weight, REDUCTIONS[reduction], *settings)


def vocabulary_layout(call: Call, known: Known) -> tuple[Rows, ...] | None:
    """The layout of what a call makes of a vocabulary in parts; None for others.

    A sum of tables' rows, and of losses what others can't go on with as it is.
    """
    lookup = lookup_of(call)
    if lookup is not None and list(known) == [lookup.weight]:
        (rows,) = known[lookup.weight]
        if (rows.kind, rows.dim, rows.outer) == (Kind.SHARD, 0, 1):
            return (Rows(Kind.SUM),)
        if (rows.kind, rows.dim) == (Kind.SHARD, 1):
            return (rows._replace(dim=lookup.indices.meta["val"].dim()),)
    loss = loss_of(call)
    parts = {} if loss is None else {loss.logits: (Rows(Kind.SHARD, 1),)}
    return (Rows(Kind.SUM),) if parts and known == parts else None


def _are_nodes(*values: Any) -> bool:
    return all(isinstance(value, fx.Node) for value in values)
