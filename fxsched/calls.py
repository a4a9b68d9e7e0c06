"""The modules that programs call: bundles in, bundles out, around flat stage graphs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .aot import Pair
from .graphs import result

Place = tuple[int, int]  # group of a stage, and tensor in the group


def forward_module(pair: Pair, places: list[Place], outs: int) -> fx.GraphModule:
    """Calls the flat forward graph with bundles: (weights, inputs, seed) -> outputs,
    saved, and a bundle for each group with new state."""
    call = _Wrapper(pair, places)
    flat = call.forward()
    results: list[Any] = [call.item(flat, i) for i in range(outs)]
    new = {i: call.item(flat, outs + k) for k, i in enumerate(pair.mutated)}
    first = outs + len(pair.mutated)
    results.append(tuple(call.item(flat, first + k) for k in range(len(pair.saved))))
    for group in sorted({places[i][0] for i in pair.mutated}):
        members = sorted((k, i) for i, (g, k) in enumerate(places) if g == group)
        results.append(tuple(new.get(i) or call.state(i) for _, i in members))
    return call.finish(results)


def backward_module(
    pair: Pair, places: list[Place], recompute: bool, trained: list[tuple[bool, ...]]
) -> fx.GraphModule:
    """Calls the flat backward graph with bundles: (weights, saved, inputs, tangents,
    seed) -> gradients of inputs, and a bundle of gradients for each group."""
    call = _Wrapper(pair, places, backward=True)
    saved: Callable[[int], fx.Node]
    if recompute:
        flat = call.forward()
        outs = len(result(pair.forward)) - len(pair.saved)

        def saved(k: int) -> fx.Node:
            return call.item(flat, outs + k)
    else:

        def saved(k: int) -> fx.Node:
            return call.item(call.saved, k)

    arguments = []
    for what, i in pair.needs:
        if what == "state":
            arguments.append(call.state(i))
        elif what == "input":
            arguments.append(call.item(call.inputs, i))
        elif what == "saved":
            arguments.append(saved(i))
        else:
            arguments.append(call.item(call.tangents, pair.tangents.index(i)))
    call.root["flat_backward"] = pair.backward
    flat = call.graph.call_module("flat_backward", tuple(arguments))
    count = len(pair.input_gradients)
    results: list[Any] = [call.item(flat, i) for i in range(count)]
    given = {i: call.item(flat, count + k) for k, i in enumerate(pair.state_gradients)}
    for group in sorted({places[i][0] for i in given}):
        members = sorted((k, i) for i, (g, k) in enumerate(places) if g == group)
        results.append(
            tuple(
                given.get(i)
                or call.graph.call_function(torch.zeros_like, (call.state(i),))
                for k, i in members
                if trained[group][k]
            )
        )
    return call.finish(results)


class _Wrapper:
    """Builds the graph that unpacks bundles for a flat graph."""

    def __init__(self, pair: Pair, places: list[Place], backward: bool = False) -> None:
        self.pair, self.places, self.graph = pair, places, fx.Graph()
        self.root: dict[str, Any] = {}
        self.weights = self.graph.placeholder("weights")
        if backward:
            self.saved = self.graph.placeholder("saved")
        self.inputs = self.graph.placeholder("inputs")
        if backward:
            self.tangents = self.graph.placeholder("tangents")
        self.seed = self.graph.placeholder("seed")
        self.items: dict[tuple[fx.Node, int], fx.Node] = {}

    def item(self, value: fx.Node, index: int) -> fx.Node:
        if (value, index) not in self.items:
            found = self.graph.call_function(operator.getitem, (value, index))
            self.items[value, index] = found
        return self.items[value, index]

    def state(self, i: int) -> fx.Node:
        group, k = self.places[i]
        return self.item(self.item(self.weights, group), k)

    def forward(self) -> fx.Node:
        self.root["flat_forward"] = self.pair.forward
        count = len(self.pair.forward.graph.find_nodes(op="placeholder"))
        inputs = count - self.pair.random - len(self.places)
        arguments = [self.seed] * self.pair.random
        arguments += [self.state(i) for i in range(len(self.places))]
        arguments += [self.item(self.inputs, i) for i in range(inputs)]
        return self.graph.call_module("flat_forward", tuple(arguments))

    def finish(self, results: list[Any]) -> fx.GraphModule:
        self.graph.output(tuple(results))
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph, "Stage")
