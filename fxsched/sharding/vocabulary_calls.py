"""What shards call in the place of a vocabulary's embedding and of its loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ..rows.kinds import Kind
from .layouts import Each, Follower, Layouts, Operation, value_of
from .local_calls import LocalCall
from .vocabulary_parts import (
    cross_entropy_of_parts,
    cross_entropy_part,
    embedding_part,
)
from .vocabulary_rules import ClassLoss, Lookup, lookup_of, loss_of, vocabulary_layout


def vocabulary_call(
    follower: Follower,
    call: Operation,
    known: Layouts,
    parts: Mapping[fx.Node, Any],
) -> LocalCall | None:
    """The call on a shard's range of a vocabulary; None where shards call what the
    model does.

    known: how operands are laid out, `parts` what they are then.
    """
    layout = vocabulary_layout(call, known)
    if layout is None or layout[0].kind is not Kind.SUM:
        return None
    lookup, loss = lookup_of(call), loss_of(call)
    if lookup is not None:
        local = _lookup(lookup, follower.shards)
    else:
        assert loss is not None, "no other call has such a layout"
        local = _loss(loss, call, follower.shards)
    operation = local.on_shard(call, 0)
    given = fx.map_arg(
        (operation.args, operation.kwargs), lambda n: parts.get(n, value_of(n))
    )
    with torch.no_grad():
        return local._replace(value=follower.run(operation, *given))


def _lookup(lookup: Lookup, shards: int) -> LocalCall:
    args = (lookup.indices, lookup.weight, lookup.padding_idx, shards)
    shard = {"shard": Each(tuple(range(shards)))}
    return LocalCall(args, shard, {}, None, embedding_part)


def _loss(loss: ClassLoss, call: Operation, shards: int) -> LocalCall:
    args = (loss.logits, loss.labels, loss.weight, loss.label_smoothing > 0)
    settings = {
        "size": int(value_of(loss.logits).shape[1]) // shards,
        "reduction": loss.reduction,
        "ignore_index": loss.ignore_index,
        "label_smoothing": loss.label_smoothing,
        "dtype": call.value.dtype,
    }
    read = (loss.labels, loss.weight)
    join = Operation(
        "call_function", cross_entropy_of_parts, read, settings, call.value
    )
    shard = {"shard": Each(tuple(range(shards)))}
    return LocalCall(args, shard, {}, None, cross_entropy_part, join)
