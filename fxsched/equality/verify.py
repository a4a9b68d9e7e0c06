"""fxsched.verify: one step by a schedule beside eager PyTorch on the whole batch."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from ..backend import Backend, backend
from ..capture.batch import Batch, batch_of
from ..draw import tables
from ..ir.modes import modes_after_errors
from ..ir.user_line import line_of
from ..jobs.job import PlanError
from ..jobs.schedule import Schedule
from ..jobs.user_values import shown
from ..options import check_keywords
from ..planning import traced_nodes
from ..rows.row_warnings import RowsWarning
from ..runtime.step import Step
from .departures import Departure, first_departure
from .differences import Difference, compare_values, table_row

ROWS = 24  # of the table; the rest of what agrees is counted


@dataclass(frozen=True)
class Verification:
    """What fxsched.verify found; prints as a table.

    passed: whether the loss, all outputs, gradients and buffers agree.
    differences: of each of them. why: what departs and why, or "".
    """

    passed: bool
    differences: tuple[Difference, ...]
    why: str
    text: str

    def __str__(self) -> str:
        return self.text


def verify(
    model: nn.Module,
    schedule: Schedule,
    *inputs: Any,
    loss: Callable[[Any], Tensor] | None = None,
    **options: Any,
) -> Verification:
    """Runs a step of copies of the model, by a schedule (on threads) and in eager
    PyTorch on the whole batch; prints how losses, outputs and gradients compare, and
    the first operation that departs.

    loss: of what the model returns, a scalar with a gradient; by default the one that
        it returns.
    options: those of fxsched.backend, by name; all others are keyword arguments of the
        model.

    The model, its gradients and the state of random numbers stay as they are. Layers
    nn.Dropout are off in both copies. Raises PlanError for what cannot be planned.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"verify(model={shown(model)}): give a torch.nn.Module")
    if loss is not None and not callable(loss):
        raise PlanError(
            f"verify(loss={shown(loss)}): give a function of what the model returns, "
            "or None where that is the loss"
        )
    known = inspect.signature(backend).parameters
    backend_options = {
        name: options.pop(name) for name in list(options) if name in known
    }
    check_keywords("verify", model, options, known)
    options_of_plan = {**backend_options, "transport": "threads"}
    planner = _Verified(backend(schedule, **options_of_plan).options)
    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices), torch.enable_grad():
        eager = _Trial(model, inputs, options, loss)
        wanted = eager.values(eager.model)
    with torch.random.fork_rng(devices), torch.enable_grad():
        planned = _Trial(model, inputs, options, loss)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", RowsWarning)
            with planner:
                actual = planned.values(torch.compile(planned.model, backend=planner))
    differences = tuple(compare_values(wanted, actual))
    passed = all(each.passed for each in differences)
    complaints = [str(w.message) for w in said if w.category is RowsWarning]
    why = "" if passed else _reason(planner, complaints)
    text = _text(planner, differences, why, _dropout(model))
    print(text)
    return Verification(passed, differences, why, text)


class _Verified(Backend):
    """A backend that remembers what its last plan was made of."""

    batch: Batch | None = None

    def make(self, gm: fx.GraphModule, args: tuple[Any, ...]) -> Step:
        self.gm, self.args = gm, tuple(_copied(each) for each in args)
        self.batch = batch_of(gm, args, self.request)
        return super().make(gm, args)

    def nodes(self) -> list[fx.Node]:
        """The microbatch's, with their stages, planned once more."""
        with torch.enable_grad(), modes_after_errors():
            return traced_nodes(self.gm, self.args, self.options)


class _Trial:
    """A copy of a model and of its inputs, and what a step of it gives."""

    def __init__(
        self,
        model: nn.Module,
        inputs: tuple[Any, ...],
        named: dict[str, Any],
        loss: Callable[[Any], Tensor] | None,
    ) -> None:
        self.model = copy.deepcopy(model)
        self.model.zero_grad()
        for layer in self.model.modules():
            if isinstance(layer, nn.modules.dropout._DropoutNd):
                layer.eval()
        self.inputs, self.named = tree_map(_copied, (inputs, named))
        self.before = [(name, b.clone()) for name, b in self.model.named_buffers()]
        self.loss = loss

    def values(self, step: Callable[..., Any]) -> dict[str, Tensor | None]:
        """By name: the loss, outputs, gradients and buffers."""
        outputs = step(*self.inputs, **self.named)
        loss = _loss_of(outputs) if self.loss is None else self.loss(outputs)
        torch.autograd.backward(loss)
        values: dict[str, Tensor | None] = {"loss": loss.detach()}
        for path, value in tree_flatten_with_path(_plain(outputs))[0]:
            if isinstance(value, Tensor) and value is not loss:
                values[f"output {keystr(path)}".strip()] = value.detach()
        for name, parameter in self.model.named_parameters():
            values[f"gradient of {name}"] = parameter.grad
        for path, value in tree_flatten_with_path((self.inputs, self.named))[0]:
            if isinstance(value, Tensor) and value.requires_grad:
                values[f"gradient of input {keystr(path)}"] = value.grad
        before = dict(self.before)
        for name, buffer in self.model.named_buffers():
            if name not in before or not torch.equal(buffer, before[name]):
                values[f"buffer {name}"] = buffer.detach()
        return values


def _copied(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _plain(outputs: Any) -> Any:
    """A ModelOutput as a dict."""
    return dict(outputs) if isinstance(outputs, Mapping) else outputs


def _loss_of(outputs: Any) -> Tensor:
    leaves = [value for _, value in tree_flatten_with_path(_plain(outputs))[0]]
    scalars = [
        value
        for value in leaves
        if isinstance(value, Tensor) and value.dim() == 0 and value.requires_grad
    ]
    if len(scalars) != 1:
        raise PlanError(
            f"verify: the model returns {len(scalars)} scalars with a gradient, so its "
            "loss isn't known; give verify(..., loss=lambda outputs: ...)"
        )
    return scalars[0]


def _departure(planner: _Verified, nodes: Sequence[fx.Node]) -> Departure | None:
    """The first operation whose values depart from those of the whole batch."""
    assert planner.batch is not None
    rows = {node.name: node.meta.get("rows") for node in nodes}
    drawn = frozenset(node.name for node in nodes if node.meta.get("random"))
    return first_departure(planner.gm, planner.args, planner.batch, rows, drawn)


def _reason(planner: _Verified, complaints: list[str]) -> str:
    """What departs first, where, and what is said of it."""
    lines = []
    nodes = [] if planner.batch is None else planner.nodes()
    departure = _departure(planner, nodes) if nodes else None
    if departure is not None:
        node = next((n for n in nodes if n.name == departure.node), None)
        what = "draws random numbers, which a plan has of its own" * departure.random
        what = what or "gives something else for microbatches than for the whole batch"
        stage = None if node is None else node.meta.get("stage")
        where = "" if stage is None else f"stage {stage}, "
        module = "" if node is None else node.meta.get("module")
        where += f"module {module}: " if module else ""
        line = line_of(departure.stack)
        lines.append(f"{where}{departure.node} {what}{line}")
        complaints = [text.replace(line, "") for text in complaints]
        if departure.random:
            lines.append("  compare with model.eval(), or with probabilities of 0")
    elif not complaints:
        own = planner.options.model_passes
        cause = "of model_passes=" if own else "rounding, or our error"
        lines.append(f"no operation departs: the difference is {cause}")
    return "\n".join([*lines, *complaints])


def _dropout(model: nn.Module) -> bool:
    layers = model.modules()
    kinds = nn.modules.dropout._DropoutNd
    return any(isinstance(e, kinds) and e.training and e.p > 0 for e in layers)


def _text(
    planner: _Verified,
    differences: tuple[Difference, ...],
    why: str,
    dropout: bool,
) -> str:
    schedule = planner.request.schedule
    rows = f" of {planner.batch.rows}" if planner.batch is not None else ""
    head = (
        f"{schedule.name or 'schedule'}: {schedule.workers} workers, "
        f"{schedule.microbatches} microbatches{rows}, beside eager PyTorch on the "
        "whole batch"
    )
    bad = [each for each in differences if not each.passed]
    good = [each for each in differences if each.passed]
    shown = [*good[: max(1, ROWS - len(bad))], *bad[:ROWS]]
    cells = [table_row(each) for each in differences if each in shown]
    table = tables.table("|eager|plan|difference|allowed|", cells, "lrrrrl")
    rest = len(differences) - len(shown)
    note = "eager, plan: the largest element; difference: the largest of all elements"
    lines = [head, note, "", table]
    if rest:
        agree = f"{len(good)} agree, {len(bad)} do not"
        lines.append(f"... and {rest} more: of all {len(differences)}, {agree}")
    if dropout:
        lines.append("nn.Dropout is off in both")
    lines.append("")
    if not bad:
        lines.append(f"PASS: all {len(differences)} values are eager's")
    else:
        lines.append(f"FAIL: {len(bad)} of {len(differences)} values are not eager's")
        lines.append(why)
    return "\n".join(lines)
