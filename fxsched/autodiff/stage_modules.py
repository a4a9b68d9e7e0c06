"""The modules that programs call: bundles in, bundles out, around flat stage graphs."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..ir.graphs import result
from ..ir.lazy import lazy_module
from .stage_graphs import StageGraphs

Place = tuple[int, int]  # group of a stage, and tensor in the group


def forward_module(
    graphs: StageGraphs, places: list[Place], outs: int
) -> fx.GraphModule:
    """Calls the flat forward graph with bundles: (weights, inputs, seed) -> outputs,
    saved, and a bundle for each group with new state."""
    call = _Wrapper(graphs, places, ("weights", "inputs", "seed"))
    flat = call.forward()
    results: list[Any] = [call.item(flat, i) for i in range(outs)]
    new = {i: call.item(flat, outs + k) for k, i in enumerate(graphs.mutated)}
    first = outs + len(graphs.mutated)
    results.append(tuple(call.item(flat, first + k) for k in range(len(graphs.saved))))
    for group in sorted({places[i][0] for i in graphs.mutated}):
        members = call.members(group)
        results.append(tuple(new.get(i) or call.state(i) for _, i in members))
    return call.finish(results)


def backward_module(
    graphs: StageGraphs,
    places: list[Place],
    recompute: bool,
    trained: list[tuple[bool, ...]],
    dtype: torch.dtype | None,
) -> fx.GraphModule:
    """Calls the flat backward graph with bundles: (weights, saved, inputs, tangents,
    seed) -> gradients of inputs, and a bundle of gradients for each group, or, if the
    backward is split, one of what is carried to weight_module.

    dtype: of the groups' gradients; None for the weights' own.
    """
    names = ("weights", "saved", "inputs", "tangents", "seed")
    call = _Wrapper(graphs, places, names)
    maker, first = call.placeholders["saved"], 0  # of what F saved
    if recompute:
        maker = call.forward()
        first = len(result(graphs.forward)) - len(graphs.saved)
    arguments = []
    for what, i in graphs.needs:
        if what == "state":
            arguments.append(call.state(i))
        elif what == "input":
            arguments.append(call.item(call.placeholders["inputs"], i))
        elif what == "saved":
            arguments.append(call.item(maker, first + i))
        else:
            arguments.append(
                call.item(call.placeholders["tangents"], graphs.tangents.index(i))
            )
    call.root["flat_backward"] = graphs.backward
    flat = call.graph.call_module("flat_backward", tuple(arguments))
    count = len(graphs.input_gradients)
    results: list[Any] = [call.item(flat, i) for i in range(count)]
    if graphs.weight is None:
        results += call.gradients(flat, count, trained, dtype)
    else:
        carried = range(count, count + len(graphs.carried))
        results.append(tuple(call.item(flat, i) for i in carried))
    return call.finish(results)


def weight_module(
    graphs: StageGraphs,
    places: list[Place],
    trained: list[tuple[bool, ...]],
    dtype: torch.dtype | None,
) -> fx.GraphModule:
    """Calls the flat graph of weight gradients with bundles: (weights, carried, seed)
    -> a bundle of gradients for each group. It draws nothing, whatever the seed."""
    call = _Wrapper(graphs, places, ("weights", "carried", "seed"))
    arguments = [
        call.state(i) if what == "state" else call.item(call.placeholders["carried"], i)
        for what, i in graphs.weight_needs
    ]
    call.root["flat_weight"] = graphs.weight
    flat = call.graph.call_module("flat_weight", tuple(arguments))
    return call.finish(call.gradients(flat, 0, trained, dtype))


class _Wrapper:
    """Builds the graph that unpacks bundles for a flat graph."""

    def __init__(
        self, graphs: StageGraphs, places: list[Place], arguments: tuple[str, ...]
    ) -> None:
        self.graphs, self.places, self.graph = graphs, places, fx.Graph()
        self.root: dict[str, Any] = {}
        self.placeholders = {name: self.graph.placeholder(name) for name in arguments}
        self.items: dict[tuple[fx.Node, int], fx.Node] = {}

    def item(self, value: fx.Node, index: int) -> fx.Node:
        if (value, index) not in self.items:
            part = self.graph.call_function(operator.getitem, (value, index))
            self.items[value, index] = part
        return self.items[value, index]

    def members(self, group: int) -> list[tuple[int, int]]:
        """The tensors of a group: their places in it, and in the stage's state."""
        return sorted((k, i) for i, (g, k) in enumerate(self.places) if g == group)

    def state(self, i: int) -> fx.Node:
        group, k = self.places[i]
        return self.item(self.item(self.placeholders["weights"], group), k)

    def gradients(
        self,
        flat: fx.Node,
        first: int,
        trained: list[tuple[bool, ...]],
        dtype: torch.dtype | None,
    ) -> list[Any]:
        """A bundle for each group, from results of a flat graph; zeros for tensors of
        the group that other stages alone have gradients of."""
        indices = self.graphs.state_gradients
        by_index = {i: self.item(flat, first + k) for k, i in enumerate(indices)}
        results = []
        kind: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        for group in sorted({self.places[i][0] for i in by_index}):
            results.append(
                tuple(
                    by_index.get(i)
                    or self.graph.call_function(
                        torch.zeros_like, (self.state(i),), kind
                    )
                    for k, i in self.members(group)
                    if trained[group][k]
                )
            )
        return results

    def forward(self) -> fx.Node:
        self.root["flat_forward"] = self.graphs.forward
        count = len(self.graphs.forward.graph.find_nodes(op="placeholder"))
        inputs = count - self.graphs.random - len(self.places)
        arguments = [self.placeholders["seed"]] * self.graphs.random
        arguments += [self.state(i) for i in range(len(self.places))]
        arguments += [self.item(self.placeholders["inputs"], i) for i in range(inputs)]
        return self.graph.call_module("flat_forward", tuple(arguments))

    def finish(self, results: list[Any]) -> fx.GraphModule:
        self.graph.output(tuple(results))
        self.graph.lint()
        return lazy_module(self.root, self.graph, "Stage")
