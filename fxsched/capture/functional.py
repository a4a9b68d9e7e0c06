"""New versions of values in the place of writes into them.

before: h = linear(x, w); relu_(h); row = select(h, 0, 0); fill_(row, 1); add_(m, row)
        y = h + m
after:  h = linear(x, w); h_1 = relu(h)
        row = select(h_1, 0, 0)
        h_2 = written(fill_, {self: h_1, value: 1}, {self: [select(0, 0)]}, [row])
        row_1 = select(h_2, 0, 0); m_1 = add(m, row_1); y = h_2 + m_1; copy_(m, m_1)

Only inputs are written, at the end, and what normalizations move. Bodies of a user's
functions stay as they are.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from ..ir.early import Early
from ..ir.graphs import ancestors, is_view, named_arguments, storage, tensors
from ..ir.lazy import lazy_module
from ..ir.meta import of_node
from ..ir.regions import Regions
from ..ir.rewrites import extracted
from ..ir.written import gives_one, written
from .effects import targets_of, written_by
from .graph_inputs import placeholders

aten = torch.ops.aten
COPY = aten.copy_.default
SET_GRADIENTS: Any = torch._C._set_grad_enabled
EARLY = "early"  # gm.meta: the writes into weights


def without_writes(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph, as the file says; itself if it writes nothing."""
    return _Functional(gm).run() if any(map(written_by, gm.graph.nodes)) else gm


class _Functional:
    """before and after: see the file.

    new: the latest node for each old one; made: the version of its root that it is of.
    parents: what a value is a view of, or the same as, if it is in `same`. A root has
        none, `versions` count the writes into it, and `last` is the last of these.
    gradients: whether a node runs with them.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm, self.graph = gm, fx.Graph()
        self.new: dict[fx.Node, Any] = {}
        self.made: dict[fx.Node, int] = {}
        self.parents: dict[fx.Node, fx.Node] = {}
        self.same: set[fx.Node] = set()
        self.versions: Counter[fx.Node] = Counter()
        self.last: dict[fx.Node, fx.Node] = {}
        self.gradients: dict[fx.Node, bool] = {}
        self.inputs: dict[fx.Node, fx.Node] = {}

    def run(self) -> fx.GraphModule:
        """The new graph."""
        with Regions() as regions:
            for node in self.gm.graph.nodes:
                self.gradients[node] = torch.is_grad_enabled()
                if node.op == "output":
                    self._finish(node)
                elif written_by(node) and not _is_alone(node):
                    self._write(node)
                else:
                    self._copy(node)
                regions.pass_by(node)
        result = lazy_module(self.gm, self.graph)
        result.meta.update(self.gm.meta)
        return result

    def _copy(self, node: fx.Node) -> None:
        new = self.new[node] = self.graph.node_copy(node, self._latest)
        parent = self._parent(node)
        if parent is not None:
            self.parents[node] = parent
            self.same |= set() if _is_step(node) else {node}
            self.made[node] = self.versions[self._root(node)]
        if node.op == "placeholder":
            self.inputs[node] = new

    def _parent(self, node: fx.Node) -> fx.Node | None:
        """What a node's value shares memory with, of what it reads; or an input that is
        the same tensor."""
        memory, reads = _memory(node), list(self.inputs)
        if node.op == "call_function":
            reads = node.all_input_nodes[: 1 if _is_step(node) else None]
        if node.target is operator.getitem and not _is_step(node):
            same = [n for n in node.args[0].users if n.args == node.args]  # type: ignore[union-attr]
            return next((n for n in same if n in self.new and n is not node), None)
        for read in reads:
            alike = _is_step(node) or _spec(_value(read)) == _spec(_value(node))
            if alike and not memory.isdisjoint(_memory(read)):
                return read
        return None

    def _root(self, node: fx.Node) -> fx.Node:
        while node in self.parents:
            node = self.parents[node]
        return node

    def _is_root(self, node: Any) -> bool:
        """Whether a value is all of what it is a view of."""
        while node in self.same:
            node = self.parents[node]
        return node not in self.parents

    def _latest(self, node: fx.Node) -> Any:
        """A node's new one, of what memory is now."""
        number = self.versions[self._root(node)]
        if self.made.get(node, 0) != number:
            if node in self.same:
                self.new[node] = self._latest(self.parents[node])
            else:
                self.new[node] = self._again(node)
            self.made[node] = number
        return self.new[node]

    def _again(self, view: fx.Node) -> fx.Node:
        """A view once more, with gradients if it was made with them."""
        then, now = self.gradients[view], torch.is_grad_enabled()
        for read in view.all_input_nodes:
            self._latest(read)
        self._set_gradients(now, then, view)
        new = self.graph.node_copy(view, self._latest)
        self._set_gradients(then, now, view)
        return new

    def _set_gradients(self, before: bool, after: bool, like: fx.Node) -> None:
        if before != after:
            self._added(like, SET_GRADIENTS, (after,))

    def _added(
        self,
        like: fx.Node,
        target: Any,
        args: tuple[Any, ...],
        value: Any = None,
        kwargs: dict[str, Any] | None = None,
    ) -> fx.Node:
        new = self.graph.create_node("call_function", target, args, kwargs, like.name)
        new.meta = {**like.meta, "example_value": value}
        return new

    def _write(self, node: fx.Node) -> None:
        """Makes new versions of what a node writes into."""
        targets = written_by(node)
        plain = self._out_of_place(node, targets[0])
        versions = self._written(node, targets) if plain is None else [plain]
        for target, version in zip(targets, versions, strict=True):
            root = self._root(target)
            before = self.last.get(root, node)  # in a checkpoint it is refused
            self.last[root] = before if "recompute" in of_node(before) else node
            self.new[root] = version
            self.versions[root] += 1
            self.made[root] = self.versions[root]
        if node not in self.new:
            self.parents[node] = targets[0]
            self.same.add(node)

    def _out_of_place(self, node: fx.Node, target: fx.Node) -> Any:
        """What all of a value becomes, where an operation gives it out of place. Where
        gradients are off, those of what was there go on."""
        root, given = self._root(target), (node.args, node.kwargs)
        first = node.args[:1] == (target,) and self._is_root(target)
        if not first or not self.gradients[node]:
            return None
        if node.target is COPY:
            source: Any = node.args[1]
            return self._latest(source) if is_version(source, root) else None
        draws = torch.Tag.nondeterministic_seeded in node.target.tags  # type: ignore[union-attr]
        twin = None if draws else _twin(node.target)
        args, kwargs = fx.map_arg(given, _value)
        value = twin(*args, **kwargs) if twin else None
        if _spec(value) != _spec(_value(root)):
            return None
        args, kwargs = fx.map_arg(given, self._latest)
        return self._added(node, twin, args, value, kwargs)

    def _written(self, node: fx.Node, targets: Sequence[fx.Node]) -> list[fx.Node]:
        """The new versions of what these are views of; notes what else a node gives."""
        into = targets_of(node)
        rest = {k: v for k, v in named_arguments(node).items() if k not in into}
        rest = fx.map_arg(rest, self._latest)
        roots = fx.map_arg(into, lambda n: self._latest(self._root(n)))
        paths = fx.map_arg(into, self._path)
        examples = [_value(self._root(n)).clone() for n in targets]
        views = [self._latest(n) for n in targets if not self._is_root(n)]
        args = node.target, {**rest, **roots}, paths, views
        if gives_one(node.target, paths):
            return [self._added(node, written, args, examples[0])]
        every = (_value(node), *examples)
        new = self._added(node, written, args, every)
        items = [
            self._added(node, operator.getitem, (new, i), value)
            for i, value in enumerate(every)
        ]
        if every[0] is not None:
            self.new[node] = items[0]
        return items[1:]

    def _path(self, node: fx.Node) -> list[Any]:
        """How a view is made of its root."""
        if node not in self.parents:
            return []
        before = self._path(self.parents[node])
        if node in self.same:
            return before
        if node.target is operator.getitem:
            return [*before, node.args[1]]
        rest = fx.map_arg((node.args[1:], node.kwargs), self._latest)
        return [*before, (str(node.target), *rest)]

    def _finish(self, output: fx.Node) -> None:
        """Writes the last versions into inputs, and returns what the graph does."""
        results = {n: self._latest(n) for n in output.all_input_nodes}
        written = {n: self._keep(n) for n in self.inputs if n in self.last}
        for node in results:
            if self._is_root(node):
                results[node] = written.get(self._root(node), results[node])
        self.graph.node_copy(output, results.__getitem__)

    def _keep(self, root: fx.Node) -> fx.Node:
        """Writes the last version of an input into it."""
        like, gradients = self.last[root], not is_weight(root)
        self._set_gradients(True, gradients, like)
        new = self._added(like, COPY, (self.inputs[root], self.new[root]), _value(root))
        self._set_gradients(gradients, True, like)
        return new


def _twin(target: Any) -> OpOverload | None:
    """What computes out of place what an operation does in place."""
    name = target.overloadpacket.__name__
    if target.namespace != "aten" or not name.endswith("_"):
        return None
    return getattr(getattr(aten, name[:-1], None), target._overloadname, None)


def _is_alone(node: fx.Node) -> bool:
    """Whether a write is all that happens to an input."""
    targets = written_by(node)
    inputs = targets[0].op == "placeholder" and not is_weight(targets[0])
    return inputs and len(targets) == 1 == len(targets[0].users) and not node.users


def _is_step(node: fx.Node) -> bool:
    """Whether a node gives a view of what it reads first, or one of several."""
    source: Any = node.args[0] if node.args else None
    if node.target is operator.getitem:
        return isinstance(source, fx.Node) and _is_step(source)
    return is_view(node.target)


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _memory(node: fx.Node) -> set[int]:
    return set(map(storage, tensors(_value(node))))


def _spec(value: Any) -> str:
    """What tells apart tensors of the same memory."""
    if not isinstance(value, Tensor):
        return ""
    return f"{value.dtype} {value.shape} {value.stride()} {value.storage_offset()}"


def is_version(value: Any, state: fx.Node) -> bool:
    """Whether a computed value is what a state becomes where it is copied into it.

    State that nothing else reads is read with it: else no stage would have it.
    """
    if not isinstance(value, fx.Node) or value.op != "call_function":
        return False
    read = state.op != "placeholder" or len(state.users) > 1
    return read and _spec(_value(value)) == _spec(_value(state))


def is_weight(node: fx.Node) -> bool:
    """Whether an input is a parameter, or trained."""
    value = _value(node)
    return isinstance(value, nn.Parameter) or bool(getattr(value, "requires_grad", 0))


def early_writes(gm: fx.GraphModule) -> tuple[Early, ...]:
    """Those that were taken out of a graph; each reads a weight, and writes into it."""
    found: tuple[Early, ...] = gm.meta.get(EARLY, ())
    return found


def take_early_writes(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph, without what writes into weights before anything else reads them:
    each microbatch would do so with a copy of the weight; eager PyTorch does so once.

    before: data = w.data; data.clamp_(0, 4.6); y = x * w.exp()
    after:  y = x * w.exp()                       # and w.clamp_(0, 4.6) in each call

    What is written must come of that weight alone. Other writes stay, and are errors.
    """
    writes = []
    for i, weight in enumerate(placeholders(gm)):
        ends = [n for n in weight.users if n.target is COPY and n.args[0] is weight]
        if ends and is_weight(weight):
            nodes = sorted(ancestors(ends[0].all_input_nodes[1:]))
            apart = all(n.op == "call_function" for n in nodes if n is not weight)
            later = {user for n in nodes[:-1] for user in n.users} - {*nodes, *ends}
            if apart and not later:
                alone = extracted(gm, [weight], [*nodes[1:], ends[0]], [])
                writes.append(Early(alone, (i,)))
                for node in (ends[0], *reversed(nodes[1:])):
                    node.replace_all_uses_with(weight)
                    gm.graph.erase_node(node)
    gm.meta[EARLY] = tuple(writes)
    return gm
