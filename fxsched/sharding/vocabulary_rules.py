"""Rules for vocabularies in parts: tables that are read by index, and losses of logits.

Other rules are of the operations that run; these are of the calls in the model, which
become others on shards (vocabulary_calls.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import fx

from ..rows.kinds import Kind, Rows

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


def lookup_of(target: Any, args: Any, kwargs: Any) -> Lookup | None:
    """The embedding that a call is, if parts of its weight can be read by index."""
    if target is not F.embedding:
        return None
    given = _arguments(target, args, kwargs)
    plain = not given["scale_grad_by_freq"] and not given["sparse"]
    nodes = (given["input"], given["weight"])
    if given["max_norm"] is not None or not plain or not _are_nodes(*nodes):
        return None
    padding = given["padding_idx"]
    if padding is not None and padding < 0:
        padding += int(given["weight"].meta["val"].shape[0])
    return Lookup(*nodes, padding)


def loss_of(target: Any, args: Any, kwargs: Any) -> ClassLoss | None:
    """The cross entropy that a call is, if it is one of labels."""
    if target is not F.cross_entropy:
        return None
    given = _arguments(target, args, kwargs)
    logits, labels, weight = (given[name] for name in ("input", "target", "weight"))
    old = (given["size_average"], given["reduce"]) != (None, None)
    if old or not _are_nodes(logits, labels):
        return None
    values, numbers = logits.meta["val"], labels.meta["val"]
    if numbers.is_floating_point() or values.dim() != numbers.dim() + 1:
        return None
    if values.dim() < 2:
        return None
    settings = (given[n] for n in ("reduction", "ignore_index", "label_smoothing"))
    return ClassLoss(logits, labels, weight, *settings)


def vocabulary_layout(
    target: Any, args: Any, kwargs: Any, known: Known
) -> tuple[Rows, ...] | None:
    """The layout of what a call makes of a vocabulary in parts; None for others.

    A sum of tables' rows, and of losses what others can't go on with as it is.
    """
    lookup = lookup_of(target, args, kwargs)
    if lookup is not None and list(known) == [lookup.weight]:
        (rows,) = known[lookup.weight]
        if (rows.kind, rows.dim, rows.outer) == (Kind.APART, 0, 1):
            return (Rows(Kind.SUM),)
        if (rows.kind, rows.dim) == (Kind.APART, 1):
            return (rows._replace(dim=lookup.indices.meta["val"].dim()),)
    loss = loss_of(target, args, kwargs)
    parts = {} if loss is None else {loss.logits: (Rows(Kind.APART, 1),)}
    return (Rows(Kind.SUM),) if parts and known == parts else None


def _arguments(target: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    call = inspect.signature(target).bind(*args, **kwargs)
    call.apply_defaults()
    return call.arguments


def _are_nodes(*values: Any) -> bool:
    return all(isinstance(value, fx.Node) for value in values)
