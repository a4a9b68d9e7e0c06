"""What a job's tensors take while it runs, op after op.

Tensors that a job makes are freed after their last use, and so is what it was given to
use up: what F saved, and what no other job reads. A gradient that is added to a sum is
freed as soon as it is there.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx

from ..ir.graphs import Spec, arguments, base, is_view, result
from ..ir.meta import Moments, of_node

HANDED = ("saved", "carried")  # what an earlier job of the stage made for this one
GIVEN = ("inputs", "tangents")


class Handed(NamedTuple):
    """A tensor of a bundle that a job hands to a later one. memory: equal for tensors
    that share it. bytes: of that."""

    memory: fx.Node
    bytes: int


def handed(flat: fx.GraphModule | None, count: int) -> list[Handed]:
    """The last `count` results of a flat graph."""
    values = result(flat)[-count:] if flat is not None and count else ()
    return [Handed(home, _bytes(home)) for home in map(_home, values)]


def job_moments(
    stage: fx.GraphModule, bundle: Sequence[Handed] = (), adds: bool = False
) -> Moments:
    """What a job takes beyond what its worker holds when it begins.

    stage: its module, of bundles; see stage_modules. bundle: what an earlier job of the
    stage saved for it. adds: whether its gradients of weights are added to sums.
    Returns pairs: the arguments that it needs no more (i: input i; -1 - i: tangent i),
    and the most bytes that it takes from then on; those of the arguments are in them.
    """
    return _Walk(stage, bundle, adds).run()


class _Given(NamedTuple):
    """An argument of the module, or a part of one, by its path."""

    name: str
    path: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        """As job_moments returns it."""
        return self.path[0] if self.name == "inputs" else -1 - self.path[0]


Home = _Given | tuple[int, fx.Node] | fx.Node  # what memory a value is in


class _Walk:
    def __init__(
        self, stage: fx.GraphModule, bundle: Sequence[Handed], adds: bool
    ) -> None:
        self.stage, self.bundle, self.adds = stage, bundle, adds
        self.made: list[list[Home]] = []  # by op
        self.last: dict[Home, int] = {}  # the last op that uses a value
        self.sizes: dict[Home, int] = {}
        self.calls = 0

    def run(self) -> Moments:
        env: dict[fx.Node, Any] = {}
        for node in self.stage.graph.nodes:
            if node.op == "placeholder":
                env[node] = _Given(node.name)
            elif node.target is operator.getitem:
                env[node] = self._part(env[node.args[0]], arguments(node)[1])
            elif node.op == "call_module":
                flat: Any = self.stage.get_submodule(str(node.target))
                env[node] = self._flat(flat, [env[each] for each in node.args])
            elif node.op != "output":
                env[node] = node
        stays = {home for home in self._results(env) if home in self.sizes}
        return tuple(self._moments(stays))

    def _part(self, value: Any, index: int) -> Any:
        if not isinstance(value, _Given):
            return value[index] if isinstance(value, list) else value
        if value.name in HANDED:
            memory = self.bundle[index].memory
            self.sizes[memory] = self.bundle[index].bytes
            return memory
        return _Given(value.name, (*value.path, index))

    def _flat(self, flat: fx.GraphModule, given: Sequence[Any]) -> list[Any]:
        """The homes of what a flat graph gives."""
        self.calls += 1
        homes: dict[fx.Node, Home] = {}
        values = iter(given)
        for node in flat.graph.nodes:
            root = _home(node)
            if node.op == "placeholder":
                homes[node] = next(values)
            elif root not in homes and node.op == "call_function":
                homes[root] = self.calls, root
                self.sizes[homes[root]] = _bytes(root)
            if node.op != "call_function":
                continue
            place = len(self.made)
            new = homes[root] if root is node else None
            self.made.append([] if new is None else [new])
            read = map(_home, (node, *node.all_input_nodes))
            self.last.update((homes[each], place) for each in read if each in homes)
        return [homes.get(_home(value)) for value in result(flat)]

    def _results(self, env: dict[fx.Node, Any]) -> Iterator[Home]:
        """What is still there when the job is done."""
        for value in result(self.stage):
            if isinstance(value, fx.Node):
                yield env[value]
            elif not self.adds:
                yield from (env[each] for each in value)

    def _moments(self, stays: set[Home]) -> Iterator[tuple[tuple[int, ...], int]]:
        ends: dict[int, list[Home]] = {}
        for home, place in self.last.items():
            if home not in stays:
                ends.setdefault(place, []).append(home)
        now = most = 0
        gone: tuple[int, ...] = ()
        for place, made in enumerate(self.made):
            now += sum(self.sizes[home] for home in made)
            most = max(most, now)
            ended = ends.get(place, ())
            now -= sum(self.sizes.get(home, 0) for home in ended)
            given = (home for home in ended if isinstance(home, _Given))
            its = tuple(each.position for each in given if each.name in GIVEN)
            if its:
                yield gone, most
                gone, most = its, now
        yield gone, max(most, now)


def _home(node: Any) -> Any:
    """The node in whose memory a value is."""
    while isinstance(node, fx.Node):
        root = base(node)
        if root.target is operator.getitem:
            maker = root.all_input_nodes[0]
            if is_view(maker.target):
                node = maker
                continue
        return root
    return node


def _bytes(node: fx.Node) -> int:
    value = of_node(node).get("val")
    return Spec.of(value).bytes if isinstance(value, Tensor) else 0
