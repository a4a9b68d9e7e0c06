"""What the inputs of Dynamo's graph are: the user's names for them, and the batch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .jobs import PlanError
from .origins import Origin


def batch_inputs(
    gm: fx.GraphModule, inputs: Sequence[Any], microbatches: int
) -> list[int]:
    """Which inputs are cut into microbatches: those with a symbolic batch size."""
    nodes = placeholders(gm)
    given = _user_tensors(gm, inputs)
    if microbatches == 1:
        return given
    if not given:
        raise PlanError(
            f"the model has no tensor input to cut into {microbatches} microbatches; "
            "pass it the batch, with samples along dimension 0"
        )
    candidates = batch_candidates(gm, inputs)
    symbols = _batch_symbols(gm, inputs)
    batch = [
        i
        for i in candidates
        if symbol_of(nodes[i].meta["example_value"].shape[0]) in symbols
    ]
    lengths = Counter(inputs[i].shape[0] for i in batch or candidates or given)
    (length, count), *others = lengths.most_common()
    if batch and any(other == count for _, other in others):
        names = [origin_of(nodes[i]).name for i in batch]
        raise PlanError(
            f"inputs {', '.join(names)} have different lengths along dimension 0 "
            f"({', '.join(map(str, lengths))}), and any of them could be the batch; "
            "keep tensors that all samples share in the model, as buffers"
        )
    batch = [i for i in batch if inputs[i].shape[0] == length]
    if length % microbatches or length == 0:
        first = next(i for i in batch or given if inputs[i].shape[0] == length)
        name = origin_of(nodes[first]).name
        raise PlanError(
            f"input {name} has a batch of {length}, which does not divide into "
            f"{microbatches} microbatches; pass a multiple of {microbatches} or "
            "another Schedule(microbatches=)"
        )
    if not batch:
        raise _fixed_batch(nodes, inputs, candidates)
    return batch


def _user_tensors(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[int]:
    """Arguments of the call that are tensors with a dimension 0."""
    return [
        i
        for i, node in enumerate(placeholders(gm))
        if isinstance(inputs[i], Tensor)
        and inputs[i].dim() > 0
        and not isinstance(inputs[i], torch.nn.Parameter)
        and origin_of(node).argument
    ]


def batch_candidates(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[int]:
    """Arguments that may be cut into microbatches; one row can't be."""
    return [i for i in _user_tensors(gm, inputs) if inputs[i].shape[0] > 1]


def _batch_symbols(gm: fx.GraphModule, inputs: Sequence[Any]) -> set[Any]:
    """Symbols of dimension 0 of arguments that name no other length of theirs."""
    values = [p.meta.get("example_value") for p in placeholders(gm)]
    leading: set[Any] = set()
    other: set[Any] = set()
    for i in batch_candidates(gm, inputs):
        value = values[i]
        assert isinstance(value, Tensor)
        leading.add(symbol_of(value.shape[0]))
        other.update(symbol_of(size) for size in value.shape[1:])
    return leading - other - {None}


def _fixed_batch(
    nodes: list[fx.Node], inputs: Sequence[Any], candidates: list[int]
) -> PlanError:
    sizes = inputs[candidates[0]].shape[0]
    value = nodes[candidates[0]].meta["example_value"]
    environment = value.fake_mode.shape_env
    fixed = {s for s, r in environment.replacements.items() if r.is_number}
    lines = [
        re.sub(r"  # \S*?([^/\s]+:\d+ in \w+).*", r"  # \1", str(guard.sloc))
        for guard in environment.guards
        if guard.expr.free_symbols and guard.expr.free_symbols <= fixed
    ]
    where = f" by\n  {lines[0]}\n" if lines else " by the model, "
    return PlanError(
        f"the batch size is fixed to {sizes}{where}so the batch cannot be cut into "
        "microbatches; take sizes from the input's shape (x.shape[0], or -1) instead"
    )


def placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def symbol_of(size: object) -> Any:
    """The sympy symbol of a symbolic size, or None if it's a number or expression."""
    if not isinstance(size, torch.SymInt):
        return None
    expression = size.node.expr
    return expression if expression.is_Symbol else None


def origin_of(node: fx.Node) -> Origin:
    """Where an input comes from, as trace.note_origins wrote it down."""
    origin: Origin = node.meta["origin"]
    return origin
