"""How the microbatches' values of an output become what the user gets.

What can be known is: rows are joined, a value that no row of the batch went into is
the same in all, a size follows from the batch's, sums and means over rows are told by
the operations that make them. Of other numbers the user says what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, fx

from ..ir.graphs import REPLICATED, Output, Role, ancestors, storage, written_storages
from ..ir.meta import of_node
from ..ir.request import OutputReduction
from ..ir.user_line import line_of, user_line
from ..jobs.job import PlanError
from ..placement.kinds import REPLICATE, Kind, Rows
from .batch import Batch
from .chosen_rows import FILLED
from .graph_inputs import plain
from .microbatch import Microbatch
from .returns import Returned
from .state_updates import StateUpdates, mark_written

REDUCTIONS = get_args(OutputReduction)
Name = int | str


class TracedOutput(NamedTuple):
    """What is known of a tensor that Dynamo's graph returns.

    name: its index or key in what the user gets, or the attribute that it is stored in.
    returned: whether the user gets it, and not only an attribute.
    value: a microbatch's, fake.
    sizes: the whole batch's, in symbols.
    origins: which of "batch", "random" and "state" (that the model writes) it comes of.
    rows: what became of the rows of the batch in it.
    where: the user's line that makes it.
    """

    name: Name
    returned: bool
    value: Tensor
    sizes: Sequence[Any]
    origins: frozenset[str]
    rows: Rows | None
    where: str

    @property
    def known(self) -> str | None:
        """What microbatches' values become, if that is known: the batch's value is
        their mean or sum."""
        if self.rows is None or self.rows.cause or "state" in self.origins:
            return None
        return {Kind.MEAN: "mean", Kind.SUM: "sum"}.get(self.rows.kind)


def describe(traced: TracedOutput, batch: Batch, how: str | None) -> Output:
    """How the microbatches' values of an output are put together.

    how: what the user says, or None. What may be the loss is left to `decide`.
    Raises PlanError for what cannot be put together, or not as the user says.
    """
    output = Output(
        "rows", differentiable=traced.value.requires_grad, name=traced.name, how=how
    )
    dims = [i for i, size in enumerate(traced.sizes) if batch.changes(size)]
    if dims:
        mixed = traced.rows is not None and traced.rows.outer > 1
        if len(dims) > 1 or mixed or not batch.joins(traced.sizes[dims[0]]):
            raise _apart(traced, batch)
        if how is not None:
            raise PlanError(
                f"backend(outputs={{{traced.name!r}: {how!r}}}): this output has a row "
                "for each sample, so fxsched returns the rows of all microbatches; "
                "leave it out of outputs="
            )
        return output._replace(dim=dims[0])
    if how is not None:
        _possible(traced, how)
        return output._replace(kind="one" if how == "last" else "folded")
    if not traced.origins or traced.origins == {"state"}:
        last = "last" if traced.origins else None
        return output._replace(kind="one", how=last)
    return output._replace(kind="scalar", how=traced.known)


def decide(
    outputs: Sequence[Output], traced: Mapping[int, TracedOutput]
) -> list[Output]:
    """The outputs, of which one scalar may be the loss; others are an error.

    The loss is the only output, or named so, or the one scalar that needs a gradient.
    Raises PlanError with the line to write for all that the user has to decide.
    """
    scalars = [
        i for i, each in enumerate(outputs) if each.kind == "scalar" or each.joint
    ]
    floats = [
        i
        for i in scalars
        if traced[i].value.dim() == 0
        and traced[i].value.is_floating_point()
        and traced[i].returned
    ]
    named = [i for i in floats if str(traced[i].name).split(".")[-1] == "loss"]
    trained = [i for i in floats if outputs[i].differentiable]
    alone = floats if sum(each.returned for each in traced.values()) == 1 else []
    loss = next((g for g in (named, trained, alone) if len(g) == 1), [])
    apart = [i for i in scalars if i not in loss and not outputs[i].joint]
    unknown = [i for i in apart if outputs[i].how is None]
    if unknown:
        raise _undecided([traced[i] for i in unknown])
    decided = list(outputs)
    for i in scalars:
        if i in loss:
            decided[i] = outputs[i]._replace(kind="scalar", how=None)
        elif i in apart:
            decided[i] = outputs[i]._replace(kind="folded")
    return decided


def _undecided(traced: Sequence[TracedOutput]) -> PlanError:
    lines = "".join(
        f"\n  {_called(each)}, {_shape(each)}, made at\n    {each.where}"
        for each in traced
    )
    example = {
        each.name: "mean" if each.value.is_floating_point() else "sum"
        for each in traced
    }
    return PlanError(
        "these outputs have no row for each sample, so each microbatch computes "
        f"a different value:{lines}\nsay how to combine the values: "
        f"backend(outputs={example!r}), where each may be "
        f"{', '.join(map(repr, REDUCTIONS[:-1]))} or 'last' (that of the last "
        "microbatch)"
    )


def _called(traced: TracedOutput) -> str:
    if traced.returned:
        return f"output {traced.name!r}"
    return f"{traced.name}, which the model assigns to"


def _shape(traced: TracedOutput) -> str:
    kind = str(traced.value.dtype).removeprefix("torch.")
    return f"{kind}{list(traced.value.shape)}"


def _apart(traced: TracedOutput, batch: Batch) -> PlanError:
    """What to say of a value that samples of different microbatches meet in."""
    sizes = []
    for size in traced.sizes:
        text = str(size)
        for symbol in batch.symbols:
            text = text.replace(str(symbol), "batch")
        sizes.append(text)
    return PlanError(
        f"{_called(traced)}, has shape ({', '.join(sizes)}), made at\n    "
        f"{traced.where}\nfxsched can't combine microbatches into this shape: the "
        "output has a value for each pair of samples, or its rows are not in the order "
        "of samples; return a tensor with one row for each sample, and compute this "
        "output from it outside of the model"
    )


def _possible(traced: TracedOutput, how: str) -> None:
    """Raises PlanError for a reduction that a type doesn't have."""
    dtype = traced.value.dtype
    ordered = not dtype.is_complex
    has = {
        "mean": dtype.is_floating_point or dtype.is_complex,
        "sum": dtype != torch.bool,
        "max": ordered,
        "min": ordered,
    }
    if not has.get(how, True):
        raise PlanError(
            f"backend(outputs={{{traced.name!r}: {how!r}}}): this output is "
            f"{_shape(traced)}, which has no {how}; give another of "
            f"{', '.join(REDUCTIONS)}"
        )


def finish_outputs(
    trace: Microbatch,
    declared: Mapping[int | str, str] | None,
    training: bool,
    once: bool,
) -> list[Output]:
    """Puts the outputs into the graph of a microbatch; what the user gets of them.

    declared: what their values become, as the user says; None, where it doesn't matter.
    training: whether gradients are wanted.
    once: whether state gets a new version once a call, not in each microbatch.
    """
    results = trace.outputs()
    new = [trace.new[old] if isinstance(old, fx.Node) else old for old in results]
    mark_written(trace)
    updates = StateUpdates(trace, training, once)
    states = [updates.output(position, old) for position, old in enumerate(results)]
    reader = _OutputReader(trace, declared or {})
    outputs = [
        state or updates.placed(position, old, reader.output(position, old))
        for position, (state, old) in enumerate(zip(states, results, strict=True))
    ]
    trace.graph.output(tuple(map(_returned, outputs, new)))
    if declared is None or trace.batch.microbatches == 1:
        return outputs
    return decide(outputs, reader.open)


def _returned(output: Output, new: Any) -> Any:
    """What the graph of a microbatch returns for an output."""
    if output.kind == "constant":
        return None if isinstance(output.constant, Tensor) else output.constant
    return None if output.kind in ("state", "given") else new


def declared_outputs(trace: Microbatch, declared: Mapping[int | str, str]) -> set[Any]:
    """The outputs whose microbatches' values the user says how to put together."""
    returns: Sequence[Returned] = trace.gm.meta["returns"]
    pairs = enumerate(zip(trace.outputs(), returns, strict=True))
    return {old for i, (old, each) in pairs if _name(i, each) in declared}


def _name(position: int, returned: Returned) -> int | str:
    """What the user calls an output."""
    if returned.label is not None:
        return returned.label
    return plain(returned.stored[0]) if returned.stored else position


class _OutputReader:
    """Describes the outputs that are no state.

    open: what is known of those whose microbatches have values of their own.
    """

    def __init__(self, trace: Microbatch, declared: Mapping[int | str, str]) -> None:
        self.trace, self.declared = trace, declared
        self.open: dict[int, TracedOutput] = {}
        self._written = written_storages(trace.graph)

    def output(self, position: int, old: Any) -> Output:
        """How the microbatches' values of one output become what the user gets."""
        trace = self.trace
        returned: Returned = trace.gm.meta["returns"][position]
        name = _name(position, returned)
        new = trace.new[old] if isinstance(old, fx.Node) else old
        if not isinstance(new, fx.Node):
            size = self._whole_size(name, old, new)
            return Output("constant", constant=size, name=name)
        if new.op == "get_attr":
            tensor = getattr(trace.gm, str(new.target))
            return Output("constant", constant=tensor, name=name)
        if new.op == "placeholder" and of_node(new)["role"] is Role.SHARED:
            return Output("given", state=of_node(new)["index"], name=name)
        fake = trace.values[old]
        if trace.batch.microbatches == 1:
            scalar = fake.dim() == 0 and fake.is_floating_point()
            kind, gradient = "scalar" if scalar else "whole", fake.requires_grad
            return Output(kind, differentiable=gradient, name=name)
        traced = self.open[position] = TracedOutput(
            name,
            returned.label is not None,
            fake,
            old.meta["example_value"].shape,
            self._origins_of(old, returned),
            trace.rows(old),
            str(user_line(old.meta.get("stack_trace"))),
        )
        if old in trace.joint:
            gradient = fake.requires_grad
            return Output("whole", differentiable=gradient, name=name, joint=True)
        if FILLED in old.meta:
            raise PlanError(
                f"output {name!r} has a number of rows that depends on "
                f"values{line_of(old.meta.get('stack_trace'))}\n  fxsched can't "
                "combine the rows of the microbatches; return a tensor with one row "
                "for each sample"
            )
        dim = trace.spread.get(old)
        if dim is not None:
            return Output("rows", dim, differentiable=fake.requires_grad, name=name)
        whole = self._is_whole(old, returned) and "random" not in traced.origins
        how = None if whole else self.declared.get(name)
        return describe(traced, trace.batch, how)

    def _whole_size(self, name: int | str, old: Any, new: Any) -> Any:
        """A size that is returned, for the whole batch."""
        value = getattr(old, "meta", {}).get("example_value")
        if not self.trace.batch.changes(value):
            return new
        size = self.trace.batch.whole(value)
        if size is None:
            raise PlanError(
                f"output {name!r} is a size that depends on the batch; return tensors, "
                "and take sizes from them afterwards"
            )
        return size

    def _origins_of(self, old: fx.Node, returned: Returned) -> frozenset[str]:
        """What a microbatch's value comes of. Totals that it is given are the whole
        batch's."""
        if old in self.trace.joint:
            return frozenset()
        sources = frozenset(filter(None, map(self._source, ancestors([old]))))
        return sources - {"batch"} if self._is_whole(old, returned) else sources

    def _is_whole(self, old: fx.Node, returned: Returned) -> bool:
        """Whether a microbatch makes the whole batch's value, of state and totals."""
        state = returned.version is not None or bool(returned.replaces)
        whole = state or bool(self.trace.totals_text())
        return whole and self.trace.rows(old) == REPLICATE

    def _source(self, node: fx.Node) -> str | None:
        """What a value comes of that no other value gave it."""
        new = self.trace.new[node]
        if node.op != "placeholder":
            meta = new.meta if isinstance(new, fx.Node) else {}
            own = meta.get("random") and not meta[REPLICATED]
            return "random" if own else None
        if not isinstance(new, fx.Node):
            size = node.meta.get("example_value")
            return "batch" if self.trace.batch.changes(size) else None
        if of_node(new)["role"] is Role.BATCH:
            return "batch"
        return "state" if storage(of_node(new)["val"]) in self._written else None


def output_leaves(trace: Microbatch) -> dict[fx.Node, frozenset[int]]:
    """For each output, the inputs of the call that its gradient reaches, by autograd's
    records of the trace."""
    inputs = trace.graph.find_nodes(op="placeholder")
    index = {id(of_node(node)["val"]): of_node(node)["index"] for node in inputs}
    return {
        old: frozenset(
            index[each] for each in _leaves(trace.values[old]) & index.keys()
        )
        for old in trace.outputs()
        if isinstance(old, fx.Node) and isinstance(trace.values.get(old), Tensor)
    }


def _leaves(value: Tensor) -> set[int]:
    """The tensors without a history that a value comes of, by their ids."""
    if value.grad_fn is None:
        return {id(value)} if value.requires_grad else set()
    leaves, seen, queue = set[int](), {value.grad_fn}, [value.grad_fn]
    while queue:
        function: Any = queue.pop()
        if hasattr(function, "variable"):
            leaves.add(id(function.variable))
        new = {each for each, _ in function.next_functions if each} - seen
        seen |= new
        queue += new
    return leaves
