"""fxsched.verify: compares a step of a schedule with eager PyTorch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from ..backend import Backend
from ..draw import tables
from ..ir.generators import kept_generators
from ..ir.graphs import same_strides, storage, tensors
from ..ir.meta import of_node
from ..ir.modes import modes_after_errors
from ..ir.user_line import line_of
from ..jobs.job import PlanError
from ..jobs.schedule import Schedule
from ..jobs.user_values import shown
from ..options import NAMES, Options, named_in_errors, parted, with_names
from ..placement.row_warnings import RowsWarning
from ..planning import TracedCall, traced_call
from ..progress import tell
from ..runtime.step import Step
from .departures import first_departure
from .differences import Difference, allow_noise, compare_values, table_row
from .draws import Numbers, WholeDraws
from .on_parts import OnParts, copied

ROWS = 24  # of the table; the rest of what agrees is counted
COLUMNS = 100  # of the table
NUDGES = 1, 2, -1  # units in the last place by which weights are changed


@dataclass(frozen=True, repr=False)
class Verification:
    """The result of fxsched.verify; print it for a table.

    passed: whether the loss and all outputs, gradients and buffers agree.
    differences: how each of them compares.
    why: what doesn't agree, and why; "" if all agree.
    """

    passed: bool
    differences: tuple[Difference, ...]
    why: str
    text: str

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__  # a table in a Python shell and in notebooks too


def verify(
    model: nn.Module,
    schedule: Schedule,
    *inputs: Any,
    loss: Callable[[Any], Tensor] | None = None,
    **options: Any,
) -> Verification:
    """Compares a step of a schedule with eager PyTorch on the whole batch.

    Both run on copies of the model with the same random numbers, the schedule on
    threads. The result prints as a table of how losses, outputs, gradients and buffers
    compare, and names the operation, gradient or buffer that doesn't agree. In
    training, dropout draws other random numbers under fxsched than in eager PyTorch, so
    that the losses differ. verify therefore runs eager PyTorch with the random numbers
    of the schedule.

    loss: a function of the model's output that returns a scalar with a gradient. By
        default the loss is the one that the model returns.
    options: the options of fxsched.backend; other keyword arguments are passed to the
        model.

    If values differ in a type smaller than float64, the comparison is repeated in
    float64. If the model doesn't run in float64, gradients may differ by as much as
    eager PyTorch's own do if the last bits of the weights change. The model, its
    gradients and the random generators are not changed. Raises PlanError for a model or
    schedule that can't be planned.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"verify(model={shown(model)}): give a torch.nn.Module")
    if loss is not None and not callable(loss):
        raise PlanError(
            f"verify(loss={shown(loss)}): give a function of what the model returns, "
            "or None where that is the loss"
        )
    own, options = parted("verify", model, NAMES, options)
    with named_in_errors("verify"):
        given = Options(schedule, **{**own, "transport": "threads"})
    call = _Call(model, inputs, options, loss)
    found = _compared(call, given)
    note = ""
    if not found.passed and call.is_rounded:
        again, note = _in_float64(call, given, found)
        found, said = _with_noise(call, found) if again is found else (again, "")
        note += said
    why = "" if found.passed else _reason(found)
    text = _text(found, why, note)
    return Verification(found.passed, found.differences, why, text)


verify.__signature__ = with_names(verify, NAMES)  # type: ignore[attr-defined]


class _Call(NamedTuple):
    """A model, and what it is called with."""

    model: nn.Module
    inputs: tuple[Any, ...]
    named: dict[str, Any]
    loss: Callable[[Any], Tensor] | None

    @property
    def used(self) -> Any:
        """The model's tensors, and what it is called with."""
        held = [*self.model.parameters(), *self.model.buffers()]
        return held, self.inputs, self.named

    @property
    def is_rounded(self) -> bool:
        """Whether numbers are rounded more than float64 is."""
        return any(
            each.is_floating_point() and each.dtype is not torch.float64
            for each in tensors(self.used)
        )

    def in_float64(self) -> _Call:
        """Copies of both in float64."""
        model = copy.deepcopy(self.model).double()

        def wide(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            wider = same_strides(value, torch.float64)
            return wider.requires_grad_(value.requires_grad)

        return self._replace(
            model=model,
            inputs=tree_map(wide, self.inputs),
            named=tree_map(wide, self.named),
        )


class _Compared(NamedTuple):
    """What a step of a plan and of eager PyTorch gave. said: warnings of rows."""

    planner: _Verified
    traced: TracedCall
    numbers: Numbers
    differences: tuple[Difference, ...]
    said: list[str]

    @property
    def passed(self) -> bool:
        return all(each.passed for each in self.differences)


def _compared(call: _Call, options: Options) -> _Compared:
    """A step by the plan, then one in eager PyTorch with its random numbers."""
    planner = _Verified(options)
    with kept_generators(call.used), torch.enable_grad():
        planned = _Trial(call)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", RowsWarning)
            with planner:
                actual = planned.values(torch.compile(planned.model, backend=planner))
    traced, numbers = planner.drawn()
    wanted = _in_eager(call, numbers)
    complaints = [str(w.message) for w in said if w.category is RowsWarning]
    differences = tuple(compare_values(wanted, actual))
    return _Compared(planner, traced, numbers, differences, complaints)


def _in_eager(call: _Call, numbers: Numbers, nudge: int = 0) -> dict[str, Any]:
    """What eager PyTorch makes of these draws, with weights changed by so many bits."""
    with kept_generators(call.used), torch.enable_grad():
        eager = _Trial(call)
        for each in eager.model.parameters() if nudge else ():
            each.data.mul_(1 + nudge * torch.finfo(each.dtype).eps)
        with WholeDraws(numbers) if numbers.calls else nullcontext():
            return eager.values(eager.model)


def _with_noise(call: _Call, found: _Compared) -> tuple[_Compared, str]:
    """The same, where gradients may differ as rounding makes eager's own differ, and
    what to say of that."""
    eager, *others = [_in_eager(call, found.numbers, n) for n in (0, *NUDGES)]
    differences = tuple(allow_noise(found.differences, eager, others))
    failed = [each.name for each in found.differences if not each.passed]
    fine = [each.name for each in differences if each.name in failed and each.passed]
    said = (
        f"\n{', '.join(fine)}: the difference is rounding, as large as eager PyTorch's "
        "own if the last bits of the weights change"
    )
    return found._replace(differences=differences), said if fine else ""


def _in_float64(
    call: _Call, options: Options, found: _Compared
) -> tuple[_Compared, str]:
    """The same in float64, if the model runs in it, and what to say of that."""
    tell("verify: values differ, so the comparison is repeated in float64", False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch._dynamo.reset()
    try:
        again = _compared(call.in_float64(), options)
    except (PlanError, RuntimeError, TypeError, ValueError) as error:
        why = str(error).strip().split("\n")[0]
        return found, f"not repeated in float64, in which the model doesn't run: {why}"
    finally:
        torch.set_default_dtype(before)
        torch._dynamo.reset()
    largest = max(each.largest for each in found.differences)
    if not again.passed:
        return again, "repeated in float64, which this table shows"
    return again, (
        f"repeated in float64, which this table shows: the largest difference, "
        f"{largest:.1e} in the model's type, is rounding"
    )


class _Verified(Backend):
    """A backend that remembers what its last plan was made of."""

    def make(self, gm: fx.GraphModule, args: tuple[Any, ...]) -> Step:
        self.gm, self.args = gm, tuple(map(copied, args))
        self.made = super().make(gm, args)
        return self.made

    def drawn(self) -> tuple[TracedCall, Numbers]:
        """The microbatch, traced once more, and the random numbers of the last step."""
        options, schedule = self.options, self.made.plan.schedule
        if schedule.cut is not None:  # found within the limit, if there is one
            options = replace(options, schedule=schedule, memory_limit=None)
        with torch.enable_grad(), modes_after_errors():
            traced = traced_call(self.gm, self.args, options)
            numbers = Numbers(self.made.base, traced.batch.microbatches)
            if self.made.plan.draws:
                OnParts(traced, list(map(copied, self.args)), numbers).run()
        return traced, numbers


class _Trial:
    """A copy of a model and of its inputs, and what a step of it gives."""

    def __init__(self, call: _Call) -> None:
        self.model = copy.deepcopy(call.model)
        self.model.zero_grad()
        self.inputs, self.named = tree_map(copied, (call.inputs, call.named))
        self.before = [(name, b.clone()) for name, b in self.model.named_buffers()]
        self.loss = call.loss

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
            if name not in before or not _is_same(buffer, before[name]):
                values[f"buffer {name}"] = buffer.detach()
        return values


def _is_same(a: Tensor, b: Tensor) -> bool:
    if a.layout is not torch.strided:  # which torch.equal doesn't know
        a, b = a.to_dense(), b.to_dense()
    return torch.equal(a, b)


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


def _reason(found: _Compared) -> str:
    """What departs, and where: an operation or its gradient, buffers, draws."""
    planner, traced = found.planner, found.traced
    if found.numbers.strange:
        return (
            f"{found.numbers.strange} draws random numbers otherwise in eager PyTorch "
            "than in the plan, so they can't be compared\n  compare with model.eval(), "
            "or with probabilities of 0"
        )
    with torch.enable_grad(), modes_after_errors():
        departure = first_departure(planner.gm, planner.args, traced, found.numbers)
    lines = [] if departure is None else [_of_operation(*departure)]
    failed = {each.name for each in found.differences if not each.passed}
    lines += _of_buffers(traced.graph, failed)
    for text in found.said:  # without a line that is said already
        line = next((x for x in text.split("\n") if x.startswith("  at ")), "")
        known = line and any(line in each for each in lines)
        lines.append(text.replace(f"\n{line}", "") if known else text)
    return "\n".join(lines or [_of_nothing(planner)])


def _of_operation(node: fx.Node, gradient: bool) -> str:
    stage, module = of_node(node).get("stage"), of_node(node).get("module")
    where = "" if stage is None else f"stage {stage}, "
    where += f"module {module}: " if module else ""
    line = line_of(node.meta.get("stack_trace"))
    if gradient:
        return f"{where}the gradient departs first at {node.name}{line}"
    return (
        f"{where}{node.name} gives something else for microbatches than for the whole "
        f"batch{line}"
    )


def _of_draws(graph: fx.GraphModule) -> str:
    """The first operation that draws, and what that means for losses of a training."""
    node = next(each for each in graph.graph.nodes if of_node(each).get("random"))
    return (
        f"{of_node(node).get('module') or node.name} draws random numbers: here eager "
        "PyTorch gets those of the plan; in training it draws others, so losses differ"
    )


def _of_buffers(graph: fx.GraphModule, failed: Collection[str]) -> Iterator[str]:
    """The lines that write buffers which depart."""
    for buffer in graph.graph.find_nodes(op="placeholder"):
        name, where = of_node(buffer)["name"], storage(of_node(buffer)["val"])
        written = [
            node
            for node in graph.graph.nodes
            if where in map(storage, of_node(node).get("mutates", ()))
        ]
        if f"buffer {name}" in failed and written:
            line = line_of(written[-1].meta.get("stack_trace"))
            yield f"the buffer {name} departs, which is written{line}"


def _of_nothing(planner: _Verified) -> str:
    """What is said where all that the model computes is eager's."""
    changing = ("encode", "gradient_dtype", "model_passes", "passes")
    values = [(name, getattr(planner.options, name)) for name in changing]
    given = [n for n, each in values if (any(each) if n == "encode" else each)]
    if given:
        return f"every operation and gradient is eager's, so it comes of {given[0]}="
    return (
        "every operation and gradient of the model is eager's: the plan's programs "
        "depart; please report it, with the model"
    )


def _text(found: _Compared, why: str, note: str) -> str:
    schedule, batch = found.planner.request.schedule, found.traced.batch
    rows = f" of {batch.rows}"
    head = f"{schedule}{rows}, beside eager PyTorch on the whole batch"
    bad = [each for each in found.differences if not each.passed]
    good = [each for each in found.differences if each.passed]
    shown = [*good[: max(1, ROWS - len(bad))], *bad[:ROWS]]
    cells = [table_row(each) for each in found.differences if each in shown]
    headers = "value|eager|plan|difference|allowed|note"
    width = tables.columns(COLUMNS)
    table = tables.table(headers, cells, "lrrrrl", width, ["value"])
    rest = len(found.differences) - len(shown)
    about = "eager, plan: the largest element; difference: the largest of all elements"
    lines = [tables.wrapped([head, about], width), "", table]
    if rest:
        agree = f"{len(good)} agree, {len(bad)} do not"
        lines.append(f"... and {rest} more: of all {len(found.differences)}, {agree}")
    if found.numbers.calls and not found.numbers.strange:
        lines.append(_of_draws(found.traced.graph))
    lines += [note] if note else []
    lines.append("")
    count = len(found.differences)
    if not bad:
        lines.append(f"PASS: all {count} values equal eager's")
    else:
        lines.append(f"FAIL: {len(bad)} of {count} values differ from eager's")
        lines.append(why)
    return "\n".join(lines)
