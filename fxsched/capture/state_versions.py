"""State that the model writes in place gets a new version, which a call returns.

before: self.m.lerp_(z.mean(0), 0.1); y = z - self.m
after:  new = m.clone(); new.lerp_(z.mean(0), 0.1); y = z - new; return y, new

Nothing writes into what the call was given, so all microbatches read the same. Where
the batch goes into a version, rows of all microbatches do: it is made in a stage of the
global batch, or is the mean of the microbatches'. Other versions are the same in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from torch import Tensor, fx

from ..ir.graphs import Role, Spec, storage, tensors
from ..ir.lazy import lazy_module
from ..ir.user_line import line_of
from ..jobs.job import PlanError
from .batch_norms import COUNT
from .graph_inputs import origin_of, placeholders
from .microbatch import READ, VERSION, Microbatch
from .returns import Returned


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
        and not trace.values[n].requires_grad
    }


def version_state(
    trace: Microbatch, states: dict[int, fx.Node]
) -> fx.GraphModule:
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
        nodes = list(trace.gm.graph.nodes)
        at = {node: i for i, node in enumerate(nodes)}
        self.last = {n: max((at[u] for u in n.users), default=0) for n in nodes}

    def run(self) -> fx.GraphModule:
        """The new graph."""
        gm = self.trace.gm
        for i, node in enumerate(gm.graph.nodes):
            if node.op != "output":
                self._copy(node, i)
        result = lazy_module(gm, self.graph)
        result.meta.update(gm.meta)
        results, returns = self._results()
        self.graph.output(tuple(results))
        result.meta.update({"returns": tuple(returns), READ: frozenset(self.read)})
        return result

    def _copy(self, node: fx.Node, position: int) -> None:
        written = self._written(node)
        for place in sorted(written, key=list(self.states).index):
            if self.numbers.get(place, -1) in self.read | {-1}:
                self._renew(place, node, position)
        new = self.new[node] = self.graph.node_copy(node, self.new.__getitem__)
        of = self._places(node.all_input_nodes)
        for place in written:
            self._belongs(new, place)
        for place in of - written - self._places([node]):
            self.read |= {self.numbers[place]} if place in self.numbers else set()
        for place in self._places([node]):
            self.aliases[place].append(node)

    def _renew(self, place: int, writer: fx.Node, position: int) -> None:
        """Begins a version of a state, which what was a view of the last is one of."""
        state = self.states[place]
        before = self.latest.get(place, self.new[state])
        version = self.latest[place] = self.graph.call_method("clone", (before,))
        kept = {k: writer.meta[k] for k in ("stack_trace", "module") if k in writer.meta}
        version.meta.update(kept, example_value=state.meta["example_value"])
        self.numbers[place] = version.meta[VERSION] = next(self.count)
        for alias in self.aliases[place]:
            if alias.op == "placeholder":
                self.new[alias] = version
            elif self.last[alias] >= position:
                self.new[alias] = self._again(alias, place)

    def _again(self, alias: fx.Node, place: int) -> fx.Node:
        """What was a view of a state's last version, as one of the latest."""
        if place not in self._written(alias):
            return self.graph.node_copy(alias, self.new.__getitem__)
        value = self.trace.values[alias]
        for read in alias.all_input_nodes:
            if self.trace.values[read] is value:
                return self.new[read]
        raise PlanError(
            "what an operation that writes into the model's state returns is read after "
            f"another write{line_of(alias.meta.get('stack_trace'))}\n"
            "  read the state itself there"
        )

    def _belongs(self, node: fx.Node, place: int) -> None:
        """A writer, and the views that it writes into, are of a version."""
        node.meta[VERSION] = self.numbers[place]
        views = {self.new[alias] for alias in self.aliases[place]}
        for read in node.all_input_nodes:
            if read in views and VERSION not in read.meta and read.op != "placeholder":
                self._belongs(read, place)

    def _results(self) -> tuple[list[Any], list[Returned]]:
        """What the graph returns: what it did, and versions that are not among it."""
        trace = self.trace
        old, returns = trace.outputs(), list(trace.gm.meta["returns"])
        results = [self.new[n] if isinstance(n, fx.Node) else n for n in old]
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

    def _places(self, nodes: Sequence[fx.Node]) -> set[int]:
        """The states that values are views of."""
        values = (t for n in nodes for t in tensors(self.trace.values.get(n)))
        return self.states.keys() & set(map(storage, values))

    def _written(self, node: fx.Node) -> set[int]:
        new = self.trace.new[node]
        written = new.meta.get("mutates", ()) if isinstance(new, fx.Node) else ()
        return self.states.keys() & set(map(storage, written))
