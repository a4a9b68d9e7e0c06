"""Splits a stage's backward into the gradients of its inputs and of its weights."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import NamedTuple

from torch import fx

from ..ir.graphs import Spec, base, result
from ..ir.lazy import lazy_module
from ..ir.meta import of_node
from .joint_graph import Source
from .stage_graphs import StageGraphs, bytes_of


class _Split(NamedTuple):
    """How a backward graph splits.

    inputs, weights: gradients of these. early: nodes of B, what gradients of inputs
    depend on. late: the others, of W. carried: what W reads of B's values. state: what
    it reads of the state, with its numbers. needs: what all arguments are.
    """

    inputs: list[fx.Node]
    weights: list[fx.Node]
    early: set[fx.Node]
    late: list[fx.Node]
    carried: list[fx.Node]
    state: dict[fx.Node, int]
    needs: dict[fx.Node, Source]


def split_weights(graphs: StageGraphs) -> StageGraphs:
    """The graphs with the backward split: B gives the gradients of the stage's inputs,
    which others wait for, and what is left of the weights' gradients goes to W.

    before: gx = gy @ w; t = gy.t(); gw = t @ x; return (gx, gw)
    after:  B: gx = gy @ w; return (gx, gy, x)      W: t = gy.t(); gw = t @ x

    Zero Bubble Pipeline Parallelism (Qi et al. 2023, arXiv 2401.10241). A stage whose
    inputs have no gradients, as the first, keeps in B what two or more gradients of
    weights depend on. Where no weight has a gradient there is no W.
    """
    if graphs.backward is None or not graphs.state_gradients:
        return graphs
    split = _split(graphs, graphs.backward)
    backward = _input_graph(graphs.backward.graph, split)
    arguments = backward.find_nodes(op="placeholder")
    read = [bool(node.users) for node in arguments]
    for node in arguments:
        if not node.users:
            backward.erase_node(node)
    carried = (Source("carried", k) for k in range(len(split.carried)))
    return graphs._replace(
        backward=lazy_module(graphs.backward, backward),
        needs=tuple(itertools.compress(graphs.needs, read)),
        weight=lazy_module(graphs.backward, _weight_graph(split)),
        weight_needs=(*(Source("state", i) for i in split.state.values()), *carried),
        carried=tuple(Spec.of(of_node(n)["val"]) for n in split.carried),
        carried_bytes=bytes_of(_memory(graphs, split)),
    )


def _split(graphs: StageGraphs, whole: fx.GraphModule) -> _Split:
    count = len(graphs.input_gradients)
    gradients = list(result(whole))
    inputs, weights = gradients[:count], gradients[count:]
    early = _early(whole.graph, inputs, weights)
    late = [n for n in whole.graph.nodes if n.op == "call_function" and n not in early]
    inside = set(late)
    read = [*(p for n in late for p in n.all_input_nodes), *weights]
    outside = dict.fromkeys(n for n in read if n not in inside)
    arguments = whole.graph.find_nodes(op="placeholder")
    needs = dict(zip(arguments, graphs.needs, strict=True))
    state = {node: need.number for node, need in needs.items() if need.what == "state"}
    carried = [n for n in outside if n not in state]
    read_state = {n: state[n] for n in outside if n in state}
    return _Split(inputs, weights, early, late, carried, read_state, needs)


def _memory(graphs: StageGraphs, split: _Split) -> Iterator[fx.Node]:
    """The nodes whose memory carried tensors are in; F's, of saved ones, of which
    several may be views of one."""
    made = list(result(graphs.forward))
    saved = made[len(made) - len(graphs.saved) :]
    needs = split.needs.items()
    of = {a: base(saved[need.number]) for a, need in needs if need.what == "saved"}
    return (of.get(node, node) for node in map(base, split.carried))


def _input_graph(whole: fx.Graph, split: _Split) -> fx.Graph:
    """B, still with all arguments of the whole backward."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in whole.nodes:
        if node.op == "placeholder" or node in split.early:
            new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[n] for n in (*split.inputs, *split.carried)))
    return graph


def _weight_graph(split: _Split) -> fx.Graph:
    """W: (state..., carried...) -> gradients of state."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in (*split.state, *split.carried):
        new[node] = graph.placeholder(node.name)
        new[node].meta = dict(node.meta)
    for node in split.late:
        new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[n] for n in split.weights))
    return graph


def _early(
    graph: fx.Graph, inputs: list[fx.Node], weights: list[fx.Node]
) -> set[fx.Node]:
    """The nodes that stay in B."""
    leads: dict[fx.Node, set[fx.Node]] = {}  # to which gradients of weights
    early: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op != "call_function":
            continue
        leads[node] = {w for user in node.users for w in leads.get(user, ())}
        if node in weights:
            leads[node].add(node)
        shared = not inputs and len(leads[node]) > 1
        if node in inputs or shared or any(user in early for user in node.users):
            early.add(node)
    for node in graph.nodes:  # a tuple's parts are taken where it is made
        if node.target is operator.getitem and node.all_input_nodes[0] in early:
            early.add(node)
    return early
