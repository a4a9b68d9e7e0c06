"""Runs a row of the zoo: planned by a schedule, and in plain PyTorch beside it."""

from __future__ import annotations

import contextlib
import random
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxsched
from fxsched import Plan, PlanError, Schedule, schedules

from ..cases import anything
from .case import MICROBATCHES, Case, Inputs

RELATIVE, ABSOLUTE = 2e-4, 2e-6  # float32 added up in another order
HALF = 4e-2  # and bfloat16


OPTIONAL = ("timm", "torchvision", "diffusers")


class Row(NamedTuple):
    """A line of the table. kind: "equal", "refusal", "other" or "skipped"."""

    name: str
    schedule: str
    kind: str
    detail: str
    seconds: float


class Asked(NamedTuple):
    """Of rows. schedule: the name of one, or None for each row's own; shards: how many
    each stage is cut into."""

    schedule: str | None = None
    shards: int = 1


OWN = Asked()


class Training(NamedTuple):
    """What a step gives: values by what they are."""

    outputs: dict[str, Any]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def schedule_of(case: Case, asked: Asked) -> Schedule:
    """The row's own schedule, or another one; the same each time."""
    schedule = unsharded(case, asked.schedule)
    return schedules.sharded(schedule, asked.shards) if asked.shards > 1 else schedule


def unsharded(case: Case, name: str | None) -> Schedule:
    draw = random.Random(case.seed)
    workers = draw.choice((2, 3, 4))
    name = draw.choice(case.schedules) if name is None else name
    if name in ("ddp", "fsdp"):
        workers = 2 + workers // 4 * 2  # each has as many microbatches
    if name == "random":
        return anything(case.seed, workers)
    if name == "lpp":
        return schedules.lpp(4, 2, MICROBATCHES)
    if name == "interleaved":
        return schedules.interleaved(2, MICROBATCHES)
    return getattr(schedules, name)(workers, MICROBATCHES)


def loss_of(out: Any) -> Tensor:
    """The model's own loss, or one of all it returns that can be trained."""
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if isinstance(loss, Tensor):
        return loss.mean()
    first = out[0] if isinstance(out, tuple | list) and out else out
    if isinstance(first, Tensor) and not first.dim():
        return first
    values = [v for v in pytree.tree_leaves(leaves_of(out)) if trains(v)]
    assert values, "nothing that the model returns can be trained"
    return torch.stack([v.abs().float().pow(2).mean() for v in values]).sum()


def trains(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def leaves_of(out: Any) -> dict[str, Any]:
    """What a model returned, by where it stands in it."""
    if isinstance(out, Mapping):
        items = list(out.items())
    elif isinstance(out, tuple | list):
        items = list(enumerate(out))
    elif hasattr(out, "__dict__") and not isinstance(out, Tensor):
        items = list(vars(out).items())
    else:
        return {"": out}
    return {
        f"{key}.{rest}".strip("."): leaf
        for key, value in items
        for rest, leaf in leaves_of(value).items()
    }


def part(case: Case, inputs: Inputs, b: int) -> Inputs:
    """The inputs of a microbatch: of tensors, those rows that are its."""
    dims = case.options.get("batch_dims", {})

    def cut(name: object, value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim():
            dim = dims.get(name, 0)
            return value if dim is None else value.chunk(MICROBATCHES, dim)[b]
        if isinstance(value, Mapping):
            return type(value)({k: cut(k, v) for k, v in value.items()})
        if isinstance(value, tuple | list):
            return type(value)(cut(name, v) for v in value)
        return value

    if isinstance(inputs, Mapping):
        return {name: cut(name, value) for name, value in inputs.items()}
    return tuple(cut(i, value) for i, value in enumerate(inputs))


def call(case: Case, model: Any, inputs: Inputs) -> Any:
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        if isinstance(inputs, Mapping):
            return model(**inputs)
        return model(*inputs)


def build(case: Case) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(case.seed)
    model, inputs = case.make()
    return model, inputs


def collect(model: nn.Module, inputs: Inputs, outputs: dict[str, Any]) -> Training:
    asked = pytree.tree_leaves(dict(inputs) if isinstance(inputs, Mapping) else inputs)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    gradients |= {
        f"of input {i}": x.grad
        for i, x in enumerate(asked)
        if isinstance(x, Tensor) and x.requires_grad
    }
    return Training(outputs, gradients, dict(model.named_buffers()))


def train_eager(case: Case, parts: int = MICROBATCHES) -> Training:
    """A step of plain PyTorch over the microbatches, or, of one part, the batch."""
    model, inputs = build(case)
    found: list[dict[str, Any]] = []
    losses = []
    for b in range(parts):
        out = call(case, model, part(case, inputs, b) if parts > 1 else inputs)
        loss = loss_of(out)
        (loss / parts).backward()
        losses.append(loss.detach())
        found.append(leaves_of(out))
    rules = case.options.get("outputs", {})
    outputs = {
        name: joined([o[name] for o in found], rules.get(name)) for name in found[0]
    }
    outputs["the loss"] = torch.stack(losses).mean()
    return collect(model, inputs, outputs)


def joined(values: list[Any], rule: str | None) -> Any:
    """Rows of microbatches one after the other; of single numbers the mean or sum."""
    first = values[0]
    if not isinstance(first, Tensor):
        return first
    if first.dim():
        return torch.cat([v.detach() for v in values])
    whole = torch.stack([v.detach() for v in values])
    if rule == "sum":
        return whole.sum()
    return whole.mean() if whole.is_floating_point() else whole[0]


def train_planned(case: Case, schedule: Schedule) -> tuple[Training, Plan]:
    model, inputs = build(case)
    backend = fxsched.backend(schedule, transport="threads", **case.options)
    out = call(case, torch.compile(model, backend=backend), inputs)
    loss = loss_of(out)
    loss.backward()
    if backend.plan is None:
        raise AssertionError("no plan was made: it ran as plain PyTorch")
    outputs = leaves_of(out) | {"the loss": loss}
    return collect(model, inputs, outputs), backend.plan


class Differs(Exception):
    """A value of the planned step is not eager's."""


def difference(found: Training, wanted: Training, tolerance: float) -> float:
    """The largest difference of a value, to the largest number in it."""
    largest = 0.0
    for kind, got, want in zip(Training._fields, found, wanted, strict=True):
        if set(got) != set(want):
            names = sorted(map(str, set(got) ^ set(want)))
            raise Differs(f"{kind}: {', '.join(names)} is not there on both sides")
        for name in want:
            what = f"{kind[:-1]} {name}" if kind != "outputs" else f"output {name}"
            largest = max(largest, apart(what, got[name], want[name], tolerance))
    return largest


def apart(what: str, got: Any, want: Any, tolerance: float) -> float:
    if isinstance(got, Tensor) and want is None and not got.any():
        return 0.0  # of a weight that only an unused output reaches: see README.md
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        if isinstance(want, Tensor) or isinstance(got, Tensor) or got != want:
            raise Differs(f"{what}: {short(got)} for {short(want)}")
        return 0.0
    if got.shape != want.shape or got.dtype != want.dtype:
        raise Differs(f"{what}: {short(got)} for {short(want)}")
    if not want.numel():
        return 0.0
    a, b = (t.detach().to_dense() if t.is_sparse else t.detach() for t in (got, want))
    kind = torch.complex128 if b.is_complex() else torch.float64
    a, b = a.to(kind), b.to(kind)
    same = (a == b) | (a.isnan() & b.isnan())
    off = float(torch.where(same, 0, (a - b).abs()).nan_to_num(nan=1e30).max())
    size = float(torch.where(b.isfinite(), b.abs(), 0).max())
    if off > tolerance * size + ABSOLUTE:
        at = int(torch.where(same, 0, (a - b).abs()).argmax())
        numbers = f"{a.flatten()[at]:.6g} for {b.flatten()[at]:.6g}"
        raise Differs(f"{what} differs by {off:.2g}: {numbers}")
    return off / max(size, ABSOLUTE / RELATIVE)


def short(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return repr(value)[:40]


def place_of(error: BaseException) -> str:
    """The file and line that raised an error, fxsched's own if one is on the way."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    own = Path(fxsched.__file__).parent
    mine = [f for f in frames if Path(f.filename).is_relative_to(own)]
    last = (mine or frames)[-1]
    return f" ({Path(last.filename).name}:{last.lineno})"


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else ""


def first_lines(error: BaseException) -> str:
    """The message to the first full sentence, on one line."""
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    return text if len(text) < 240 else text[:237] + "..."


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch._dynamo.reset()


def run(case: Case, asked: Asked = OWN) -> Row:
    """The row of a case. Nothing is raised but what stops the process."""
    start = time.perf_counter()
    name = ""
    with fresh():
        try:
            schedule = schedule_of(case, asked)
            name = f"{schedule.name} {schedule.workers}"
            kind, detail = "equal", compare(case, schedule)
        except PlanError as error:
            kind, detail = "refusal", first_lines(error)
        except Differs as error:
            kind, detail = "other", str(error)
        except Exception as error:
            text = f"{type(error).__name__}: {first_line(error)}"
            kind, detail = "other", text[:200] + place_of(error)
            if isinstance(error, ModuleNotFoundError) and error.name in OPTIONAL:
                kind, detail = "skipped", f"{error.name} is not installed"
            elif torch_fails_too(case, error):
                kind, detail = "skipped", f"so does torch's aot_eager: {detail}"
    return Row(case.name, name, kind, detail, time.perf_counter() - start)


def torch_fails_too(case: Case, error: Exception) -> bool:
    """torch.compile without fxsched ends with the same error."""
    torch._dynamo.reset()
    model, inputs = build(case)
    try:
        run = torch.compile(model, backend="aot_eager")
        loss_of(call(case, run, part(case, inputs, 0))).backward()
    except Exception as other:
        return type(other) is type(error) and first_line(other) == first_line(error)
    return False


def compare(case: Case, schedule: Schedule) -> str:
    """How far apart planned and eager are; Differs if more than rounding, which shards,
    as they add up in another order, are asked for in float64 too."""
    try:
        return compare_once(case, schedule)
    except Differs:
        if schedule.shards == 1 or case.autocast:
            raise
        return f"{compare_once(in_double(case), schedule)}, in float64"


def in_double(case: Case) -> Case:
    def make() -> tuple[nn.Module, Inputs]:
        model, inputs = case.make()
        wide = pytree.tree_map_only(
            Tensor, lambda t: t.double() if t.is_floating_point() else t, inputs
        )
        return model.double(), wide

    return replace(case, make=make)


def compare_once(case: Case, schedule: Schedule) -> str:
    tolerance = HALF if case.autocast else RELATIVE
    wanted, whole = train_eager(case), train_eager(case, parts=1)
    if case.apart:
        try:
            difference(wanted, whole, tolerance)
        except Differs as error:
            raise AssertionError(f"microbatches are not the batch: {error}") from None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", fxsched.RowsWarning)
        found, plan = train_planned(case, schedule)
    warned = any(each.category is fxsched.RowsWarning for each in said)
    if not case.apart and not warned:
        wanted = whole
    cut = f", {len(plan.cuts)} weights cut" if schedule.shards > 1 else ""
    return f"{difference(found, wanted, tolerance):.1e}{cut}"
