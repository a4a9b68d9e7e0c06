"""What the inputs of Dynamo's graph are: the user's names for them, and the batch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .jobs import PlanError


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
        names = [name_of(source_of(nodes[i]), roots_of(gm)) for i in batch]
        raise PlanError(
            f"inputs {', '.join(names)} have different lengths along dimension 0 "
            f"({', '.join(map(str, lengths))}), and any of them could be the batch; "
            "keep tensors that all samples share in the model, as buffers"
        )
    batch = [i for i in batch if inputs[i].shape[0] == length]
    if length % microbatches or length == 0:
        first = next(i for i in batch or given if inputs[i].shape[0] == length)
        name = name_of(source_of(nodes[first]), roots_of(gm))
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
        and source_of(node).startswith("L[")
        and not in_module(source_of(node))
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


def source_of(node: fx.Node) -> str:
    """Where Dynamo found an input, such as L['self']._modules['a']._buffers['b']."""
    if "source" in node.meta:
        return str(node.meta["source"])
    argument = node.meta.get("grapharg")
    source = getattr(argument, "source", None) or getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", node.name)
    return name() if callable(name) else str(name)


def in_module(source: str) -> bool:
    return re.search(r"\._(modules|parameters|buffers)\[", source) is not None


def roots_of(gm: fx.GraphModule) -> list[str]:
    """The expressions of the modules that inputs belong to, such as L['self']."""
    found = [
        re.split(r"\._(?:modules|parameters|buffers)\[", source)[0]
        for source in map(source_of, placeholders(gm))
        if in_module(source)
    ]
    return list(dict.fromkeys(found))


def name_of(source: str, roots: list[str]) -> str:
    """The user's name of an input: layers.0.weight, or x, or batch['x']."""
    if in_module(source):
        path = re.findall(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", source)
        root = re.split(r"\._(?:modules|parameters|buffers)\[", source)[0]
        rest = source.rsplit("]", 1)[1]
        prefix = [_plain(root)] if len(roots) > 1 else []
        return ".".join(prefix + path) + rest
    return _plain(source)


def _plain(source: str) -> str:
    """L['batch']['x'] as batch['x']."""
    return re.sub(r"^[LG]\['([^']*)'\]", r"\1", source)


def module_of(node: fx.Node, roots: list[str]) -> str:
    """The dotted name of the innermost module that a node was called in, or ''."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])
    path = re.sub(r"\._modules\['([^']*)'\]", r".\1", path)
    for root in roots:
        if path == root or path.startswith(root + "."):
            rest = path[len(root) :].strip(".")
            return ".".join(filter(None, [_plain(root)] * (len(roots) > 1) + [rest]))
    return _plain(path)
