"""State that the model writes in place gets a new version, which a call returns.

before: self.m.lerp_(z.mean(0), 0.1); y = z - self.m
after:  new = m.clone(); new.lerp_(z.mean(0), 0.1); y = z - new; return y, new

Nothing writes into what the call was given, so all microbatches read the same. Where
the batch goes into a version, rows of all microbatches do: it is made in a stage of the
global batch, or is the mean of the microbatches'. Other versions are the same in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx

from ..ir.graphs import Role, Spec, storage, tensors
from ..ir.lazy import lazy_module
from ..ir.user_line import line_of
from ..jobs.job import PlanError
from .batch_norms import COUNT
from .graph_inputs import origin_of, placeholders
from .microbatch import READ, VERSION, Microbatch
from .returns import Returned

CLONE = torch.ops.aten.clone.default


def written_state(trace: Microbatch) -> dict[int, fx.Node]:
    """The inputs that are state and written in place, by storage, but for weights that
    are trained and the statistics of normalizations."""
    written, learned = set[int](), set[int]()
    for node in trace.graph.nodes:
        own = set(map(storage, node.meta.get("learns", ())))
        written |= {storage(t) for t in node.meta.get("mutates", ())} - own
        learned |= own
    inputs = [n for n in placeholders(trace.gm) if isinstance(trace.new[n], fx.Node)]
    places = {origin_of(n).name: storage(trace.values[n]) for n in inputs}
    for name, place in places.items():
        norm = places.get(name.removesuffix(COUNT) + "running_mean")
        if name.endswith(COUNT) and norm in learned:
            written.discard(place)  # it counts what that norm learned of
    return {
        places[origin_of(n).name]: n
        for n in reversed(inputs)
        if places[origin_of(n).name] in written
        and trace.new[n].meta["role"] is not Role.BATCH
        and not origin_of(n).argument
        and not trace.inputs[trace.new[n].meta["index"]].requires_grad
    }


def version_state(trace: Microbatch, states: dict[int, fx.Node]) -> fx.GraphModule:
    """A copy of the graph that was traced, which returns new versions of states instead
    of writing into them; gm.meta["returns"] says which outputs they are."""
    return _Versions(trace, states).run()


class _Versions:
    """before and after: see the file."""

    def __init__(self, trace: Microbatch, states: dict[int, fx.Node]) -> None:
        self.trace, self.states, self.graph = trace, states, fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.latest: dict[int, fx.Node] = {}  # version of each state
        self.numbers: dict[int, int] = {}  # of these
        self.aliases: dict[int, list[fx.Node]] = {place: [] for place in states}
        self.count = count()
        self.read: set[int] = set()  # numbers of versions that others than writers read
        self.stale: set[fx.Node] = set()  # what is a view of an earlier version

    def run(self) -> fx.GraphModule:
        """The new graph."""
        gm = self.trace.gm
        for node in gm.graph.nodes:
            if node.op != "output":
                self._copy(node)
        result = lazy_module(gm, self.graph)
        result.meta.update(gm.meta)
        results, returns = self._results()
        self.graph.output(tuple(results))
        result.meta.update({"returns": tuple(returns), READ: frozenset(self.read)})
        return result

    def _copy(self, node: fx.Node) -> None:
        written = self._written(node)
        for place in written:
            if place not in self.latest or self.numbers[place] in self.read:
                self._renew(place, node)
        new = self.new[node] = self.graph.node_copy(node, self._latest)
        for place in written:
            self._belongs(new, place)
        own, reads = self._places([node]), self._places(node.all_input_nodes)
        self.read.update(
            self.numbers[place]
            for place in reads
            if place in self.numbers and place not in (*written, *own)
        )
        for place in own:
            self.aliases[place].append(node)

    def _renew(self, place: int, writer: fx.Node) -> None:
        """Begins a version of a state, which what was a view of the last is one of."""
        state = self.states[place]
        before = self.latest.get(place, self.new[state])
        version = self.latest[place] = self.graph.call_function(CLONE, (before,))
        version.meta.update(
            example_value=state.meta["example_value"],
            stack_trace=writer.meta.get("stack_trace"),
            module=writer.meta.get("module", ""),
        )
        self.numbers[place] = version.meta[VERSION] = next(self.count)
        for alias in self.aliases[place]:
            if alias.op == "placeholder":
                self.new[alias] = version
            else:
                self.stale.add(alias)

    def _latest(self, node: fx.Node) -> fx.Node:
        """A node's new one, of the latest versions of states."""
        if node in self.stale:
            self.stale.discard(node)
            self.new[node] = self._again(node)
        return self.new[node]

    def _again(self, alias: fx.Node) -> fx.Node:
        """What was a view of a state's last version, as one of the latest."""
        if not self._written(alias):
            return self.graph.node_copy(alias, self._latest)
        value = self.trace.values[alias]
        for read in alias.all_input_nodes:
            if self.trace.values[read] is value:
                return self._latest(read)
        raise PlanError(
            "what an operation that writes into the model's state returns is read "
            f"after another write{line_of(alias.meta.get('stack_trace'))}\n"
            "  read the state itself there"
        )

    def _belongs(self, node: fx.Node, place: int) -> None:
        """A writer, and the views that it writes into, are of a version."""
        node.meta[VERSION] = self.numbers[place]
        views = {self.new[each] for each in self.aliases[place]}
        for read in node.all_input_nodes:
            if read in views and VERSION not in read.meta and read.op != "placeholder":
                self._belongs(read, place)

    def _results(self) -> tuple[list[Any], list[Returned]]:
        """What the graph returns: what it did, and versions that are not among it."""
        trace = self.trace
        old, returns = trace.outputs(), list(trace.gm.meta["returns"])
        results = [self._latest(n) if isinstance(n, fx.Node) else n for n in old]
        for place, state in sorted(
            self.states.items(), key=lambda item: trace.new[item[1]].meta["index"]
        ):
            index = trace.new[state].meta["index"]
            same = [i for i, n in enumerate(old) if self._is_state(n, place, state)]
            for i in same:
                returns[i] = returns[i]._replace(version=index)
            if not same:
                results.append(self.latest[place])
                stored = (origin_of(state).name,)
                returns.append(Returned(None, stored, (), index, kept=True))
        return results, returns

    def _is_state(self, output: Any, place: int, state: fx.Node) -> bool:
        value = self.trace.values.get(output) if isinstance(output, fx.Node) else None
        if not isinstance(value, Tensor) or storage(value) != place:
            return False
        return Spec.of(value) == Spec.of(self.trace.values[state])

    def _places(self, nodes: Sequence[fx.Node]) -> list[int]:
        """The states that values are views of."""
        return self._among(t for n in nodes for t in tensors(self.trace.values.get(n)))

    def _written(self, node: fx.Node) -> list[int]:
        new = self.trace.new[node]
        return (
            self._among(new.meta["mutates"])
            if isinstance(new, fx.Node) and "mutates" in new.meta
            else []
        )

    def _among(self, values: Iterable[Tensor]) -> list[int]:
        memory = set(map(storage, values))
        return [place for place in self.states if place in memory]
