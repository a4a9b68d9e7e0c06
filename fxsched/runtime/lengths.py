"""Calls of other lengths, filled up to lengths that many calls share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import SymInt, Tensor, fx

from ..capture.batch import expression_of, lengths_of, resized
from ..capture.graph_inputs import placeholders, symbol_of
from ..capture.lengths import LengthInput, bucket, declared_lengths
from ..capture.samples import names_of
from ..ir.graphs import result
from ..ir.request import Lengths
from ..jobs.job import PlanError

Sizes = Mapping[Any, int]  # symbolic sizes of a graph, and what they are in a call


class FilledCall(NamedTuple):
    """A call whose lengths are filled up.

    args: filled up.
    true, filled: what the lengths that change were, and are.
    what: is filled up, in words.
    """

    args: tuple[Any, ...]
    true: Sizes
    filled: Sizes
    what: str

    def trimmed(self, gm: fx.GraphModule, outputs: Sequence[Any]) -> list[Any]:
        """A graph's outputs without what was added; gradients of that are zeros.

        Raises PlanError for one from which it can't be taken.
        """
        nodes = result(gm)
        return [
            self._cut(value, _example(node))
            for value, node in zip(outputs, nodes, strict=True)
        ]

    def _cut(self, value: Any, example: Any) -> Any:
        if isinstance(example, SymInt):
            expression = expression_of(example)
            known = expression.free_symbols & set(self.true)
            return int(expression.xreplace(self.true)) if known else value
        if not isinstance(example, Tensor):
            return value
        for dim, size in enumerate(example.shape):
            expression = expression_of(size)
            symbols = set() if expression is None else expression.free_symbols
            if symbols & set(self.true):
                if not symbols <= set(self.true):
                    raise PlanError(
                        f"backend(lengths=) fills up {self.what}, and dimension {dim} "
                        "of an output has samples and positions in one, from which "
                        "those that were added can't be taken; return it as [samples, "
                        "positions, ..], or take it out of what the model returns"
                    )
                value = value.narrow(dim, 0, int(expression.xreplace(self.true)))
        return value


def fill_lengths(
    gm: fx.GraphModule, args: tuple[Any, ...], lengths: Lengths
) -> FilledCall | None:
    """The call with its lengths filled up; None if they are lengths of plans already.

    Raises PlanError for what can't be filled up.
    """
    inputs = declared_lengths(gm, args, lengths)
    long = [each for each in inputs if each.length > 1]  # 1 is Dynamo's constant
    for each in long:
        expression = expression_of(each.size)
        if expression is None or not expression.free_symbols:
            raise _fixed(gm, args, each, inputs)
    true = lengths_of(placeholders(gm), args)
    filled = _targets(gm, long, true)
    changed = {symbol for symbol in true if filled[symbol] != true[symbol]}
    if not changed:
        return None
    _check_others(gm, args, inputs, changed)
    new = {each.input: _filled(args[each.input], each, filled) for each in long}
    names = ", ".join(each.name for each in long)
    spans = dict.fromkeys(f"{true[s]} to {filled[s]}" for s in true if s in changed)
    return FilledCall(
        resized(gm, args, new),
        {symbol: true[symbol] for symbol in changed},
        {symbol: filled[symbol] for symbol in changed},
        f"{names} ({', '.join(spans)})",
    )


def _targets(
    gm: fx.GraphModule, inputs: Sequence[LengthInput], true: Sizes
) -> dict[Any, int]:
    """What sizes become: those that are as long as each other together, and none longer
    than what the graph is for (positions that a model has)."""
    filled = dict(true)
    symbols = {symbol_of(each.size): each.length for each in inputs}
    for length in sorted(set(symbols.values())):
        alike = [s for s in symbols if s is not None and symbols[s] == length]
        for target in range(bucket(length), length, -1):
            trial = {**filled, **dict.fromkeys(alike, target)}
            if _allowed(gm, trial):
                filled = trial
                break
    return filled


def _allowed(gm: fx.GraphModule, sizes: Sizes) -> bool:
    """Whether the model's graph is one for these sizes."""
    for node in placeholders(gm):
        example = node.meta.get("example_value")
        if isinstance(example, Tensor):
            environment = example.fake_mode.shape_env  # type: ignore[attr-defined]
            guards = [environment.replace(each.expr) for each in environment.guards]
            return all(str(guard.xreplace(sizes)) != "False" for guard in guards)
    return True


def _filled(tensor: Tensor, entry: LengthInput, sizes: Sizes) -> Tensor:
    """before: a, b, c  # to be filled up with 0 to 5
    after:  a, b, c, 0, 0"""
    dim, value = entry.fill
    more = int(expression_of(entry.size).xreplace(sizes)) - entry.length
    if not more:
        return tensor
    shape = [*tensor.shape[:dim], more, *tensor.shape[dim + 1 :]]
    added = torch.full(shape, value, dtype=tensor.dtype, device=tensor.device)
    return torch.cat([tensor, added], dim)


def _check_others(
    gm: fx.GraphModule,
    args: Sequence[Any],
    inputs: Sequence[LengthInput],
    changed: set[Any],
) -> None:
    """Raises PlanError for a size that changes too, of which nothing is declared."""
    declared = {(each.input, each.fill.dim) for each in inputs}
    for i, node in enumerate(placeholders(gm)):
        if not isinstance(args[i], Tensor):
            continue
        for dim, size in enumerate(_example(node).shape):
            expression = expression_of(size)
            changes = expression is not None and expression.free_symbols & changed
            if changes and (i, dim) not in declared:
                raise _undeclared(names_of(node)[0].name, dim, args[i], inputs)


def _undeclared(
    name: str, dim: int, tensor: Tensor, inputs: Sequence[LengthInput]
) -> PlanError:
    return PlanError(
        f"dimension {dim} of {name}, of shape {list(tensor.shape)}, is as long as what "
        f"backend(lengths=) fills up, but isn't declared; {_remedy(name, dim, inputs)}"
    )


def _fixed(
    gm: fx.GraphModule,
    args: Sequence[Any],
    entry: LengthInput,
    inputs: Sequence[LengthInput],
) -> PlanError:
    """The error for a length that the model takes for a constant."""
    declared = {(each.input, each.fill.dim) for each in inputs}
    batch = {i: node for i, node in enumerate(placeholders(gm)) if names_of(node)}
    others = [
        (names_of(node)[0].name, dim)
        for i, node in batch.items()
        if isinstance(args[i], Tensor) and node.meta.get("arguments")
        for dim, length in enumerate(args[i].shape)
        if length == entry.length and (i, dim) not in declared and dim > 0
    ]
    remedy = "take sizes from its shape, or leave it out of lengths="
    if others:
        remedy = f"{_remedy(*others[0], inputs)}; else {remedy}"
    return PlanError(
        f"backend(lengths=) can't fill up {entry.name}: the model fixes its length to "
        f"{entry.length}; {remedy}"
    )


def _remedy(name: str, dim: int, inputs: Sequence[LengthInput]) -> str:
    said = {each.name: (each.fill.dim, each.fill.value) for each in inputs}
    if name in said:
        return (
            f"{name} can be filled up in one dimension alone: make it inside the "
            "model, from one that is declared, or leave lengths= out"
        )
    words = ", ".join(f'"{key}": {value}' for key, value in said.items())
    return (
        f"say what fills it up, lengths={{{words}, "
        f'"{name}": ({dim}, 0)}}, if 0 is what the model takes for nothing'
    )


def _example(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None
