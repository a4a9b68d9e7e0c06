"""Links joint graphs of the pieces of a stage to the joint graph of the stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ..ir.graphs import REPLICATED, Spec, ancestors, result
from ..ir.lazy import lazy_module
from ..ir.meta import of_node
from ..ir.model_lines import LINE
from .activation_checkpoints import is_forward
from .equal_blocks import Piece
from .joint_graph import Joint, Source

DETACH = torch.ops.aten.detach.default


class Linked:
    """Builds the joint graph of a stage of the joint graphs of its pieces, which are
    added from the last to the first, as their gradients are known.

    before: piece 0: (w, x, gy) -> (y, gw, gx)   piece 1: (v, y, gz) -> (z, gv, gy)
    after:  (w, v, x, gz) -> (z, gw, gv, gx)

    stage: its graph. live: which of its outputs have gradients. state: how many of its
    arguments are weights and buffers.
    """

    def __init__(
        self, stage: fx.GraphModule, live: tuple[bool, ...], state: int
    ) -> None:
        self.stage, self.live, self.state = stage, live, state
        self.number = {node: i for i, node in enumerate(stage.graph.nodes)}
        self.returned = {node: i for i, node in enumerate(result(stage))}
        self.added: list[tuple[Piece, Joint]] = []
        self.given: set[fx.Node] = {  # values that have a gradient
            node for node, i in self.returned.items() if live[i]
        }

    def wants(self, piece: Piece) -> tuple[bool, ...]:
        """Which outputs of the next piece have gradients."""
        return tuple(node in self.given for node in piece.outputs)

    def add(self, piece: Piece, joint: Joint) -> bool:
        """Takes the next piece; False for one that can't be linked: it writes into what
        it reads, or an output of it is no value of its own."""
        wanted = {i for i, wants in enumerate(self.wants(piece)) if wants}
        tangents = {s.number for s in joint.arguments.values() if s.what == "tangent"}
        if wanted != tangents or any(s.what != "output" for s in joint.results):
            return False
        self.added.append((piece, joint))
        self.given.update(piece.inputs[i] for i, _ in _gradients(joint))
        return True

    def joint(self) -> Joint | None:
        """The stage's joint graph; None if a gradient that a piece gives is laid out
        otherwise than the next one was traced with."""
        return _Link(self).build()


class _Link:
    """One graph of the joint graphs of all pieces: F of all, then B of the last first.

    values: of the stage's nodes, in the new graph. gradients: of these, added up.
    """

    def __init__(self, linked: Linked) -> None:
        self.linked, self.graph = linked, fx.Graph()
        self.root: dict[str, Any] = {}
        self.values: dict[fx.Node, fx.Node] = {}
        self.gradients: dict[fx.Node, fx.Node] = {}
        self.arguments: dict[str, Source] = {}
        self.new: list[dict[fx.Node, fx.Node]] = []  # by piece, of its joint graph

    def build(self) -> Joint | None:
        added = self.linked.added
        self.new = [{} for _ in added]
        self._placeholders()
        for k in reversed(range(len(added))):
            self._forward(k)
        for k in range(len(added)):
            if not self._backward(k):
                return None
        outputs = [self.values[node] for node in self.linked.returned]
        stage = self.linked.stage.graph.find_nodes(op="placeholder")
        given = {
            i: self.gradients[n] for i, n in enumerate(stage) if n in self.gradients
        }
        self.graph.output((*outputs, *given.values()))
        return Joint(
            lazy_module(self.root, self.graph, "Joint"),
            self.arguments,
            tuple(Source("output", i) for i in range(len(outputs))),
            tuple(given),
        )

    def _placeholders(self) -> None:
        """The stage's arguments, and the gradients of its outputs."""
        state = self.linked.state
        for i, node in enumerate(self.linked.stage.graph.find_nodes(op="placeholder")):
            new = self.graph.placeholder(f"primals_{i + 1}")
            self.values[node] = new
            of_node(new)["val"] = of_node(node)["val"]
            own = Source("state", i) if i < state else Source("input", i - state)
            self.arguments[new.name] = own
        traced = dict(self._tangents())
        for node, i in self.linked.returned.items():
            if self.linked.live[i]:
                new = self.graph.placeholder(f"tangents_{i + 1}")
                new.meta = _traced(traced[node])
                self.gradients[node] = new
                self.arguments[new.name] = Source("tangent", i)

    def _tangents(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """The stage's values with gradients, and the arguments of pieces for these."""
        for piece, joint in self.linked.added:
            for node in joint.gm.graph.find_nodes(op="placeholder"):
                what, i = joint.arguments[node.name]
                if what == "tangent":
                    yield piece.outputs[i], node

    def _forward(self, k: int) -> None:
        piece, joint = self.linked.added[k]
        for node in joint.gm.graph.find_nodes(op="placeholder"):
            what, i = joint.arguments[node.name]
            if what == "tangent":
                continue
            value = self.values[piece.inputs[i + (what == "input") * piece.state]]
            self.new[k][node] = value
            if value.op == "placeholder":
                value.meta = _traced(node)
        for node in _forward_nodes(joint):
            self._copy(k, node)
        for value, source in zip(result(joint.gm), joint.results, strict=False):
            node = piece.outputs[source.number]
            # the piece was traced with what gets no gradient detached
            inner = node not in self.linked.returned
            if inner and node not in self.linked.given and value.target is DETACH:
                value = value.args[0]
            self.values[node] = self.new[k][value]

    def _backward(self, k: int) -> bool:
        piece, joint = self.linked.added[k]
        for node in joint.gm.graph.find_nodes(op="placeholder"):
            what, i = joint.arguments[node.name]
            if what == "tangent":
                gradient = self.gradients[piece.outputs[i]]
                if not _alike(gradient, node):
                    return False
                self.new[k][node] = gradient
        for node in joint.gm.graph.nodes:
            if node.op not in ("placeholder", "output") and node not in self.new[k]:
                self._copy(k, node)
        for i, gradient in _gradients(joint):
            self._add_up(piece.inputs[i], self.new[k][gradient])
        return True

    def _add_up(self, node: fx.Node, gradient: fx.Node) -> None:
        """Adds a gradient of a value, as autograd does: the last reader's first."""
        before = self.gradients.get(node)
        if before is not None:
            meta = {**gradient.meta, "partitioner_tag": "is_backward"}
            add = torch.ops.aten.add.Tensor
            gradient = self.graph.call_function(add, (before, gradient))
            gradient.meta = meta
        self.gradients[node] = gradient

    def _copy(self, k: int, node: fx.Node) -> None:
        """Copies a node of a piece, which then speaks of the stage's node."""
        piece, joint = self.linked.added[k]
        new = self.graph.node_copy(node, self.new[k].__getitem__)
        self.new[k][node] = new
        new.meta = dict(node.meta)
        if node.op == "get_attr":
            name = f"{str(node.target).replace('.', '_')}_of_{k}"
            self.root[name] = getattr(joint.gm, str(node.target))
            new.target = name
        line = of_node(node).get("custom", {}).get(LINE, len(piece.nodes))
        # what detaches outputs was added to the piece, and comes from no line
        source = piece.nodes[line] if line < len(piece.nodes) else None
        of_node(new).pop("custom", None)
        if source is not None:
            number = self.linked.number[source]
            replicated = source.meta.get(REPLICATED, False)
            of_node(new)["custom"] = {LINE: number, REPLICATED: replicated}
            if "recompute" in of_node(new):
                of_node(new)["recompute"] = of_node(source)["recompute"]


def _forward_nodes(joint: Joint) -> list[fx.Node]:
    """What F computes: nodes that AOTAutograd made for it, and what these read."""
    nodes = joint.gm.graph.nodes
    results = result(joint.gm)[: len(joint.results)]
    made = [n for n in nodes if n.op == "call_function" and is_forward(n)]
    read = ancestors([*made, *results])
    return [n for n in nodes if n in read and n.op != "placeholder"]


def _traced(argument: fx.Node) -> dict[str, Any]:
    """What is known of an argument of a piece, but for which it is."""
    return {key: value for key, value in argument.meta.items() if key != "desc"}


def _gradients(joint: Joint) -> Iterator[tuple[int, fx.Node]]:
    """Those that a joint graph gives: of which argument, and the node."""
    given: Sequence[Any] = result(joint.gm)[len(joint.results) :]
    for i, value in zip(joint.gradients, given, strict=True):
        if i is not None and value is not None:
            yield i, value


def _alike(gradient: fx.Node, traced: fx.Node) -> bool:
    """Whether a gradient is laid out as a piece was traced with."""
    given, wanted = (Spec.of(of_node(node)["val"]) for node in (gradient, traced))
    return given == wanted
