"""Where a model's values on parts of a batch depart from those on the whole of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..capture.batch import Batch
from ..capture.graph_inputs import placeholders
from ..ir.graphs import tensors
from ..rows.kinds import SHARED, Rows

# what rounding may do to a value, as a part of its largest element
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2}
ROUNDING[torch.bfloat16] = 5e-2


class Departure(NamedTuple):
    """The first operation whose parts do not make up the whole.

    node: its name; random: whether it draws random numbers.
    """

    node: str
    random: bool
    stack: str | None


def rounding(value: Tensor) -> float:
    """What rounding may change of a value, as a part of its largest element."""
    return ROUNDING.get(value.dtype, 0.0)


def first_departure(
    gm: fx.GraphModule,
    args: Sequence[Any],
    batch: Batch,
    rows: Mapping[str, Rows | None],
    random: frozenset[str],
) -> Departure | None:
    """Runs Dynamo's graph on the whole batch and on each microbatch, and compares.

    rows, random: of its nodes, by name. Values that only come of random numbers, or of
    the numbers of the rows, are no departures.
    """
    every = range(batch.microbatches)
    whole = _values(gm, args)
    parts = [_values(gm, _part(gm, args, batch, b)) for b in every]
    unknown: set[fx.Node] = set()  # come of random numbers
    for node in gm.graph.nodes:
        if node.name in random or any(read in unknown for read in node.all_input_nodes):
            unknown.add(node)
            continue
        value_rows = rows.get(node.name)
        reads = any(read in whole for read in node.all_input_nodes)
        if (
            node not in whole
            or not reads
            or (value_rows is not None and value_rows.numbers)
        ):
            continue
        values = zip(*(list(tensors(each[node])) for each in parts), strict=True)
        pairs = zip(tensors(whole[node]), values, strict=True)
        if not all(
            _make_up(value, part, value_rows or SHARED) for value, part in pairs
        ):
            return Departure(node.name, False, node.meta.get("stack_trace"))
    first = next((n for n in gm.graph.nodes if n.name in random), None)
    stack = None if first is None else first.meta.get("stack_trace")
    return None if first is None else Departure(first.name, True, stack)


class _Recorder(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op != "output" and next(tensors(value), None) is not None:
            self.values[n] = fx.node.map_aggregate(value, _copied)
        return value


def _copied(value: Any) -> Any:
    """As it is now; a later operation may write into it."""
    return value.detach().clone() if isinstance(value, Tensor) else value


@torch.no_grad()
def _values(gm: fx.GraphModule, args: Sequence[Any]) -> dict[fx.Node, Any]:
    recorder = _Recorder(gm)
    recorder.run(*map(_copied, args))
    return recorder.values


def _part(
    gm: fx.GraphModule, args: Sequence[Any], batch: Batch, number: int
) -> list[Any]:
    """What the graph is called with for one microbatch."""
    part = list(args)
    for index, node in enumerate(placeholders(gm)):
        if index in batch.dims:
            chunks = args[index].chunk(batch.microbatches, batch.dims[index])
            part[index] = chunks[number]
        elif not isinstance(args[index], Tensor):
            part[index] = batch.size(node.meta.get("example_value"), args[index])
    return part


def _make_up(whole: Tensor, parts: Sequence[Tensor], rows: Rows) -> bool:
    """Whether parts, side by side, or all the same, or added up, or their mean, are
    the whole."""
    first = parts[0]
    if first.shape == whole.shape:
        if all(_close(part, whole) for part in parts):
            return True
        if not whole.is_floating_point():
            return _close(sum(parts, torch.zeros_like(whole)), whole)
        total = torch.stack(list(parts)).sum(0)
        return _close(total, whole) or _close(total / len(parts), whole)
    if first.dim() != whole.dim():
        return False
    dims = [i for i in range(whole.dim()) if first.shape[i] != whole.shape[i]]
    if len(dims) != 1 or len(parts) * first.shape[dims[0]] != whole.shape[dims[0]]:
        return False
    dim = dims[0]
    outer = rows.outer if rows.dim == dim else 1
    shape = [*first.shape[:dim], outer, -1, *first.shape[dim + 1 :]]
    blocks = [part.reshape(shape) for part in parts]
    return _close(torch.cat(blocks, dim + 1).flatten(dim, dim + 1), whole)


def _close(value: Tensor, whole: Tensor) -> bool:
    if not whole.numel():
        return True
    if not whole.is_floating_point():
        return bool(torch.equal(value, whole))
    allowed = rounding(whole) * float(whole.abs().nan_to_num().max())
    return bool(torch.allclose(value, whole, 0.0, allowed + 1e-12, equal_nan=True))
