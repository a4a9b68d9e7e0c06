"""A graph that torch.export made of a model, and how a call of the model goes by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, fx

from .graph_inputs import placeholders, symbol_of
from .structure import Structure
from .whole_batches import Pin, Place


class ExportedGraph(NamedTuple):
    """A model's graph, as Dynamo would hand it over.

    gm: the graph; its inputs are `state`, then those of the call at `used`.
    state: parameters, buffers and other tensors of the model, the tensors themselves.
    used: which tensors of the call the graph reads.
    result: what the model returns, without its tensors.
    sources: for each value that is given: of the call's tensors or the state that it
        is, the position in all of the graph's inputs; or None, for the next output of
        the graph.
    places: for each tensor of the result, which of these it is, or a row of.
    guards: what tracing took to be true of sizes.
    """

    gm: fx.GraphModule
    state: tuple[Tensor, ...]
    used: tuple[int, ...]
    result: Structure
    sources: tuple[int | None, ...]
    places: tuple[Place, ...]
    guards: tuple[Pin, ...]

    def inputs(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """What the graph takes, of a call's tensors."""
        return (*self.state, *(tensors[i] for i in self.used))

    def results(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        """What the model returns, of what the graph took and gave."""
        rest = iter(outputs)
        values = [next(rest) if i is None else inputs[i] for i in self.sources]
        rows = {
            p.value: values[p.value].unbind(0) for p in self.places if p.row is not None
        }
        tensors = [
            values[p.value] if p.row is None else rows[p.value][p.row]
            for p in self.places
        ]
        return self.result.with_tensors(tensors)

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a call's tensors have sizes that this graph is for."""
        sizes: dict[Any, int] = {}
        inputs = placeholders(self.gm)[len(self.state) :]
        for node, i in zip(inputs, self.used, strict=True):
            known = node.meta["example_value"].shape
            if len(known) != tensors[i].dim():
                return False
            for size, actual in zip(known, tensors[i].shape, strict=True):
                symbol = symbol_of(size)
                wanted = size if symbol is None else sizes.setdefault(symbol, actual)
                if wanted != actual:
                    return False
        return all(map(partial(_holds, sizes=sizes), self.guards))


def _holds(guard: Pin, sizes: Mapping[Any, int]) -> bool:
    return str(guard.size.xreplace(sizes)) == str(guard.value)  # sympy's, or Python's
