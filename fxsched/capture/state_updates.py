"""State that the model writes, as outputs of its graph.

before: m_1 = lerp(m, z, 0.1); y = z - m_1; copy_(m, m_1); return y
after:  m_1 = lerp(m, z, 0.1); y = z - m_1; return y, m_1

Nothing writes into what the call was given, so all microbatches read the same. Where
the batch goes into a version, rows of all microbatches do: it is made in a stage of the
global batch, or is the mean of the microbatches'. Other versions are the same in all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..ir.graphs import Output, Role, Spec, named_arguments, storage, written_storages
from ..ir.meta import of_node
from ..ir.rewrites import added, rewritten
from ..ir.user_line import line_of, user_line
from ..ir.written import written
from ..jobs.job import PlanError
from ..placement.kinds import Kind
from .effects import refuse_recomputed, statistics_of, targets_of, written_by
from .functional import COPY, is_version
from .graph_inputs import origin_of, placeholders
from .microbatch import Microbatch
from .returns import Returned

COUNT = "num_batches_tracked"


def written_state(gm: fx.GraphModule, inputs: Sequence[Any], once: bool) -> set[int]:
    """The positions of inputs that are state, written, and get new versions.

    once: whether all do, but for weights that are trained and what normalizations of
        microbatches write; else only what those of the whole batch do.
    """
    index = {node: i for i, node in enumerate(placeholders(gm))}
    writes, whole, moved = dict[str, int](), set[str](), set[str]()
    for node in gm.graph.nodes:
        for state in (n for n in written_by(node) if n in index):
            origin, trained = origin_of(state), inputs[index[state]].requires_grad
            if not origin.argument and not trained:
                writes[origin.name] = index[state]
                whole |= {origin.name} if "once" in node.meta else set()
        moved |= {origin_of(n).name for n in statistics_of(node)}
    names = set(writes) - _counts(moved) if once else whole | _counts(whole)
    return {i for name, i in writes.items() if name in names}


def _counts(statistics: Collection[str]) -> set[str]:
    """The counts of calls beside running means."""
    return {f"{name.removesuffix('running_mean')}{COUNT}" for name in statistics}


def return_state(gm: fx.GraphModule, states: set[int]) -> fx.GraphModule:
    """A copy that returns the last versions of inputs and does not write into them;
    gm.meta["returns"] says which outputs they are."""
    inputs, nodes = placeholders(gm), iter(gm.graph.nodes)
    versions: dict[int, fx.Node] = {}  # by the input's position
    old: Any = gm.graph.output_node().args[0]
    returns = list(gm.meta["returns"])

    def write(copy: fx.Node) -> fx.Node:
        node = next(nodes)
        into = [inputs.index(n) for n in written_by(node)[:1] if n in inputs]
        if states.isdisjoint(into):
            return copy
        refuse_recomputed(node)
        (position,) = into
        versions[position] = _version(copy)
        for i in (i for i, each in enumerate(old) if each is node):
            returns[i] = returns[i]._replace(version=position)
        return versions[position]

    result = rewritten(gm, write)
    output: Any = result.graph.output_node()
    results, told = list(output.args[0]), {each.version for each in returns}
    for position, version in sorted(versions.items()):
        if position not in told:
            results.append(version)
            name = origin_of(inputs[position]).name
            returns.append(Returned(None, (name,), (), position, kept=True))
    output.args = (tuple(results),)
    result.meta["returns"] = tuple(returns)
    return result


def _version(node: fx.Node) -> fx.Node:
    """What an input is after a node has written into it; takes the node's place."""
    graph, (state, *values) = node.graph, node.all_input_nodes
    if node.target is COPY and is_version(node.args[1], state):
        graph.erase_node(node)
        return values[0]
    paths = dict[str, Any]((name, []) for name in targets_of(node))
    args = node.target, named_arguments(node), paths, ()
    version = added(node, written, *args, value=node.meta["example_value"])
    graph.erase_node(node)
    return version


aten = torch.ops.aten


def mark_written(trace: Microbatch) -> None:
    """Other tensors of the model that it writes into are kept like buffers."""
    written = written_storages(trace.graph)
    for node in placeholders(trace.gm):
        new = trace.new[node]
        if isinstance(new, fx.Node) and of_node(new)["role"] is Role.SHARED:
            changed = storage(of_node(new)["val"]) in written
            if changed and not origin_of(node).argument:
                of_node(new)["role"] = Role.BUFFER


def kept_rows(trace: Microbatch) -> fx.Node | None:
    """The first node of what comes of the batch and goes into the model's state, but
    for statistics of a normalization."""
    returns: Sequence[Returned] = trace.gm.meta["returns"]
    pairs = zip(trace.outputs(), returns, strict=True)
    kept = [old for old, r in pairs if r.replaces or r.version is not None]
    kept += [
        node
        for node in trace.gm.graph.nodes
        if any(n.op == "placeholder" for n in written_by(node))
    ]
    for node in sorted(n for n in kept if isinstance(n, fx.Node)):
        rows = None if "once" in node.meta else trace.rows(node)
        if rows is not None and rows.kind is not Kind.REPLICATE:
            return node
    return None


def refuse_running(trace: Microbatch) -> None:
    """Raises PlanError for state of the batch, unless loss_reduction="exact"."""
    kept = kept_rows(trace)
    if kept is not None:
        raise PlanError(
            "loss_reduction=: the model writes a value that it computes from the batch "
            "into its own state, and would do so once for each "
            f"microbatch{line_of(kept.meta.get('stack_trace'))}\n  leave "
            "loss_reduction out: the state then has eager PyTorch's value, from all "
            "rows"
        )


class StateUpdates:
    """Finds outputs that are state, and writes new values of attributes into it.

    training: whether gradients are wanted.
    once: whether new values are outputs of the step, of the whole batch; else each
        microbatch sees what the one before it left.
    """

    def __init__(self, trace: Microbatch, training: bool, once: bool) -> None:
        self.trace, self.training, self.once = trace, training, once
        self.written = written_storages(trace.graph)
        self.states = {  # what is no part of the batch, by position
            i: state
            for i, node in enumerate(placeholders(trace.gm))
            if isinstance(state := trace.new[node], fx.Node)
            and of_node(state)["role"] is not Role.BATCH
        }

    def output(self, position: int, old: Any) -> Output | None:
        """The output that is state after the step: a buffer that the model writes
        into and returns, or a new tensor in the place of an old one."""
        replaced = self._replaced(position, old)
        if self._is_tensor(old) and storage(self.trace.values[old]) in self.written:
            for state in self.states.values():
                if _is_same(of_node(state)["val"], self.trace.values[old]):
                    return Output("state", state=of_node(state)["index"])
        if self.trace.batch.microbatches == 1:
            return None
        for state in replaced:
            self._check(state, old)
            of_node(state)["role"] = Role.BUFFER
            if not self.once:
                self._replace(state, old)
        if self.once or not replaced:
            return None
        return Output("state", state=of_node(replaced[0])["index"], replaced=True)

    def placed(self, position: int, old: Any, output: Output) -> Output:
        """An output that is a new version of state, or not, with where it goes."""
        returned: Returned = self.trace.gm.meta["returns"][position]
        replaced = self._replaced(position, old)
        if returned.version is not None and self._is_tensor(old):
            state = self.states[returned.version]
            self._check(state, old)
        elif replaced and self.once:
            state = replaced[0]
        else:
            return output
        return output._replace(
            differentiable=False,
            state=of_node(state)["index"],
            replaced=returned.version is None,
            kept=returned.kept,
        )

    def _is_tensor(self, old: Any) -> bool:
        """Whether an output is a tensor that the graph computes."""
        new = self.trace.new[old] if isinstance(old, fx.Node) else old
        return isinstance(new, fx.Node) and isinstance(self.trace.values[old], Tensor)

    def _replaced(self, position: int, old: Any) -> list[fx.Node]:
        """What an output takes the place of."""
        returned: Returned = self.trace.gm.meta["returns"][position]
        places = returned.replaces if self._is_tensor(old) else ()
        return [self.states[i] for i in places if i in self.states]

    def _check(self, state: fx.Node, old: fx.Node) -> None:
        """Raises PlanError for state that is trained, or would be part of gradients."""
        if of_node(state)["val"].requires_grad:
            raise PlanError(
                f"{_where(state, old)}but it is a trained parameter; write the new "
                "value into a buffer instead"
            )
        if self.trace.values[old].requires_grad and self.training:
            raise PlanError(
                f"{_where(state, old)}and gradients of the next call would flow "
                "through it into this call; detach it: assign new_value.detach()"
            )

    def _replace(self, state: fx.Node, old: fx.Node) -> None:
        """Writes a new value for an attribute into what it was, for later microbatches.

        before: add = n + 1; return add        # self.n = self.n + 1
        after:  add = n + 1; n.copy_(add); return None
        """
        trace = self.trace
        before, after = of_node(state)["val"], trace.values[old]
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            raise PlanError(
                f"{_where(state, old)}which is {Spec.of(after)} and was "
                f"{Spec.of(before)}; what the model keeps between microbatches must "
                "keep its shape and type, and have no dimension that is the batch"
            )
        placeholder = next(n for n, new in trace.new.items() if new is state)
        value = trace.append(aten.detach.default, old) if after.requires_grad else old
        trace.append(aten.copy_.default, placeholder, value, like=old)


def _is_same(value: Tensor, other: Tensor) -> bool:
    return storage(value) == storage(other) and Spec.of(value) == Spec.of(other)


def _where(state: fx.Node, old: fx.Node) -> str:
    line = user_line(old.meta.get("stack_trace"))
    return f"the tensor {of_node(state)['name']} gets a new value, at\n  {line}\n"
