"""From the model's graph to the fx graph of one microbatch.

Dynamo gave it a symbolic batch size. That is bound to the size of a microbatch and the
graph is run on fake tensors, so that every node knows its shape and nothing in the
graph is a symbol any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ..ir.early import Early
from ..ir.facts import FACTS, Facts
from ..ir.graphs import Spec
from ..ir.lazy import lazy_module
from ..ir.request import Device
from ..ir.writes import find_writes
from ..placement.kinds import Rows
from ..placement.row_warnings import Labels, labels_of, meeting_text
from ..placement.weighted_loss import labels_decide, part_means
from .batch import Batch
from .batch_norms import (
    Norms,
    part_statistics,
    refuse_kept,
    refuse_microbatch,
    whole_batch_norms,
)
from .joint_nodes import NOTHING_JOINED, join_rows
from .meta_device import cpu_specs, is_meta, on_cpu
from .microbatch import Microbatch
from .outputs import declared_outputs, finish_outputs, output_leaves
from .state_updates import kept_rows, refuse_running, return_state, written_state
from .weighted_microbatch import WeightedMicrobatch


class Traced(NamedTuple):
    """A microbatch, and what is known of it besides its graph.

    rows: what became of the rows of the batch in each output; None for no tensor.
    labels: those that means over labels are of.
    early: what computes inputs that follow those of the call, for the whole batch.
    meets: whether rows of different microbatches meet.
    spread: whether microbatches compute their own rows of what these meet in.
    norms: how many BatchNorms have statistics of the batch; or, where these are of each
        microbatch, 1 for any.
    """

    graph: fx.GraphModule
    rows: tuple[Rows | None, ...]
    labels: dict[fx.Node, Labels]
    early: Early | None
    meets: bool
    spread: bool
    norms: int


def trace_microbatch(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    batch: Batch,
    specs: Mapping[int, Spec],
    weighted: bool = False,
    outputs: Mapping[int | str, str] | None = None,
    exact: bool = False,
    by_weight: bool = True,
    spread: bool = False,
    norms: Norms = "microbatch",
    once: bool = False,
    target: Device | None = None,
) -> Traced:
    """A copy of the model's graph for one microbatch, on fake tensors.

    inputs: what the compiled function is called with (real tensors, ints).
    batch: how it is cut.
    specs: the true shapes of inputs whose storage this rank gave up, by index.
    weighted: whether what inputs decide is computed for the whole batch beforehand, by
        `early`; its values are inputs after those of the call.
    outputs: what microbatches' values of outputs become, by name, as the user says;
        None, where it doesn't matter.
    exact: whether operations that rows of microbatches meet in are of the whole batch.
    by_weight: whether it may be weighted then, where that suffices.
    spread: whether microbatches compute their own rows of what rows meet in, where they
        can.
    norms: whether BatchNorm in training sees microbatches, or the whole batch, and how;
        see batch_norms.py.
    once: whether state that the model writes gets a new version once a call, where
        operations are of the whole batch; else microbatch after microbatch.
    target: the device that costs are of; see Request.device.

    Placeholders carry `role`, `name` and `index` (into inputs); every node carries
    `val`, `module`, `work`; facts(graph).outputs says how outputs are put together.
    """
    if is_meta(inputs):
        gm, specs = on_cpu(gm), {**cpu_specs(inputs), **specs}
    cut = batch.microbatches > 1
    exact, weighted = exact and cut, weighted and cut
    apart = once and cut and not exact
    once = once and cut
    if exact and labels_decide(gm) and by_weight:
        weighted = True
    if once and exact:
        gm = part_statistics(gm)
    if exact and norms != "microbatch":
        gm = whole_batch_norms(gm, norms)
    training, call = torch.is_grad_enabled(), (inputs, batch, specs, target)
    with torch.enable_grad():  # without gradients too, B decides where to cut
        if once or exact:
            gm = return_state(gm, written_state(gm, inputs, once))
        trace = _interpreted(gm, weighted, exact, *call)
        if apart:
            refuse_running(trace)
        weighed = not trace.tracker.weighed.isdisjoint(trace.returned())
        if exact and by_weight and not weighted and weighed:
            weighted = True
            trace = _interpreted(gm, weighted, exact, *call)
        if exact and not once and kept_rows(trace):  # from microbatch to microbatch
            refuse_kept(gm)
            exact = weighted = False
            trace = _interpreted(gm, weighted, exact, *call)
        if norms != "microbatch" and trace.tracker.kept:
            refuse_microbatch(trace.tracker.kept)
        rows = tuple(map(trace.rows, trace.outputs()))
        leaves = list(map(output_leaves(trace).get, trace.outputs()))
        joined = NOTHING_JOINED
        if exact:
            parted = declared_outputs(trace, outputs or {})
            joined = join_rows(trace, trace.outputs(), parted, spread)
        described = finish_outputs(trace, outputs, training, once)
    graph = lazy_module(trace.gm, trace.graph, "Microbatch")
    totals, meeting = trace.totals_text(), meeting_text(trace.tracker, joined.meets)
    writes = find_writes(trace.graph)
    described = [
        output._replace(leaves=each)
        for output, each in zip(described, leaves, strict=True)
    ]
    linear = not trace.tracker.unlinear
    known_facts = tuple(described), writes, trace.mode, totals, meeting, linear
    graph.meta[FACTS] = Facts(*known_facts)
    pairs = zip(rows, trace.outputs(), strict=True)
    rows = tuple(trace.rows(o) if o in trace.spread else r for r, o in pairs)
    rows = tuple(map(trace.rows_left, rows, trace.outputs()))
    labels = labels_of(trace.gm, trace.rows)
    count = trace.gm.meta.get("norms", 0) or int(trace.tracker.kept is not None)
    return Traced(graph, rows, labels, trace.early(), *joined, count)


def _interpreted(
    gm: fx.GraphModule,
    weighted: bool,
    exact: bool,
    inputs: Sequence[Any],
    batch: Batch,
    specs: Mapping[int, Spec],
    target: Device | None,
) -> Microbatch:
    kind: Any = WeightedMicrobatch if weighted else Microbatch
    gm = part_means(gm, whole=exact) if weighted else gm
    trace: Microbatch = kind(gm, inputs, batch, specs, exact=exact, target=target)
    trace.interpret()
    return trace
