"""PyTorch's own tables as models: python -m tests.torch_tables [NAME ..] [--only op].

Each operator of op_db and module of
module_db is a model x * weight -> it -> loss. It is trained for a step by 1F1B with two
microbatches and in eager PyTorch on the whole batch, by fxsched.verify: loss, gradients
and buffers. What differs in float32 is repeated in float64. Ends with 1 if any is wrong
or crashes.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import itertools
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.testing._internal import common_methods_invocations as methods
from torch.testing._internal import common_modules
from torch.testing._internal.opinfo import core
from torch.testing._internal.opinfo.definitions import _masked, linalg, special
from torch.utils._pytree import tree_flatten, tree_unflatten

import fxsched
from fxsched import PlanError, schedules

from .random_plans import within

LIMIT = 60  # seconds of a model
KINDS = ("equal", "refused", "skipped", "wrong", "crashed")
EVEN = 6  # the size that samples have in place of 5
TRIED = 60  # samples of an operator, until one has a batch
PLANNED = 4  # of these, until one is not refused
UNFIT = (
    AssertionError,
    RuntimeError,
    IndexError,
    ValueError,
    TypeError,
    NotImplementedError,
)


class Row(NamedTuple):
    """What came of a model, one of KINDS, and why."""

    name: str
    kind: str
    why: str


class Sample(NamedTuple):
    """A call of an operator or module: its arguments, some of them rows of a batch."""

    call: Any
    values: list[Any]
    spec: Any


class Model(nn.Module):
    """x * weight -> what is tried -> loss. Arguments that have as many rows as x are
    inputs, other tensors buffers; alone: all but x."""

    def __init__(self, sample: Sample, alone: bool) -> None:
        super().__init__()
        self.call, self.values, self.spec = sample
        self.first = _first(sample.values)
        x = sample.values[self.first]
        self.weight = nn.Parameter(torch.rand(x.shape[1:]) + 0.5)
        self.rows = [i for i, v in enumerate(self.values) if _is_rows(v, x)]
        self.rows = [self.first] if alone else self.rows
        for i, value in enumerate(self.values):
            if isinstance(value, Tensor) and i not in self.rows:
                self.register_buffer(f"of_{i}", value)

    def inputs(self) -> list[Tensor]:
        """The whole batch."""
        return [self.values[i].clone() for i in self.rows]

    def forward(self, *rows: Tensor) -> Tensor:
        values = list(self.values)
        for i, value in enumerate(values):
            if isinstance(value, Tensor) and i not in self.rows:
                values[i] = getattr(self, f"of_{i}")
        for i, value in zip(self.rows, rows, strict=True):
            values[i] = value
        x = values[self.first] = values[self.first] * self.weight
        args, kwargs = tree_unflatten(values, self.spec)
        loss: Tensor = x.square().mean()
        for out in tree_flatten(self.call(*args, **kwargs))[0]:
            if isinstance(out, Tensor):
                real = out.abs() if out.is_complex() else out
                loss = loss + (real.to(x.dtype) / 2 + 1).square().sum() / 16
        return loss


def made(sample: Sample, alone: bool = False) -> Model:
    """The same model each time."""
    torch.manual_seed(0)
    return Model(sample, alone)


def _first(values: list[Any]) -> int:
    """The first tensor of real numbers."""
    return next(i for i, v in enumerate(values) if _is_real(v))


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_rows(value: Any, x: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == len(x)


# Samples that draw seed torch's generator first, which no compiled model may do.
vars(methods)["wrapper_set_seed"] = lambda op, *args, **kwargs: op(*args, **kwargs)


@contextlib.contextmanager
def even_sizes() -> Iterator[None]:
    """Samples of op_db have an even size where they have 5."""
    tables: list[Any] = [methods, core, _masked, linalg, special]
    before = [each.S for each in tables]
    for each in tables:
        each.S = EVEN
    try:
        yield
    finally:
        for each, size in zip(tables, before, strict=True):
            each.S = size


def operator_samples(info: Any) -> Iterator[Sample]:
    """Calls of an operator of op_db."""
    if torch.float32 not in info.dtypes or "empty" in info.name:
        return  # what is in an empty tensor is not told
    with even_sizes():
        drawn = iter(info.sample_inputs("cpu", torch.float32))
        with contextlib.suppress(*UNFIT):  # what makes some has sizes of its own
            for sample in itertools.islice(drawn, TRIED):
                given = (sample.input, *sample.args), sample.kwargs
                yield Sample(info.op, *tree_flatten(given))


def module_samples(info: Any) -> Iterator[Sample]:
    """Calls of a module of module_db, in training."""
    drawn = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=False, training=True
    )
    for sample in drawn:
        made, given = sample.constructor_input, sample.forward_input
        if given is None:
            continue
        module = info.module_cls(*made.args, **made.kwargs).train()
        yield Sample(module, *tree_flatten((given.args, given.kwargs)))


def doubled(sample: Sample) -> Sample:
    """With an odd batch, or one of two rows, twice."""
    x = next((v for v in sample.values if _is_real(v)), torch.ones(()))
    if x.layout != torch.strided or not x.dim() or (len(x) % 2 == 0 and len(x) >= 4):
        return sample
    values = [torch.cat([v, v]) if _is_rows(v, x) else v for v in sample.values]
    return sample._replace(values=values)


def reason(sample: Sample) -> str:
    """Why a sample can't be a model; "" if it can."""
    found = [v for v in sample.values if isinstance(v, Tensor)]
    if not any(map(_is_real, found)):
        return "no tensor of real numbers"
    if any(v.layout != torch.strided for v in found):
        return "sparse"
    x = sample.values[_first(sample.values)]
    if not x.numel() or not x.dim() or len(x) < 4 or len(x) % 2:
        return "no even batch"
    try:
        model = made(sample)
        loss = model(*model.inputs())
        loss.backward()
    except UNFIT as error:
        return f"eager: {type(error).__name__}: {str(error).splitlines()[0]}"
    gradient = model.weight.grad
    finite = gradient is not None and bool((loss + gradient.sum()).isfinite())
    return "" if finite else "no finite gradient"


def verdict(name: str, samples: Iterator[Sample]) -> Row:
    """What comes of an operator or module: of its first samples, until one isn't
    refused."""
    every, row = list(samples), Row(name, "skipped", "no sample of float32")
    refused = 0
    for sample in (*every, *map(doubled, every)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            why = reason(sample)
            for alone in (False, True) if not why else ():
                model = made(sample, alone)
                if row.kind in ("refused", "skipped"):
                    row = trained(name, model)
            refused += row.kind == "refused"
        if refused == PLANNED or row.kind not in ("refused", "skipped"):
            break
        row = row._replace(why=why) if row.kind == "skipped" else row
    return row


def trained(name: str, model: Model) -> Row:
    """What comes of one model."""
    torch._dynamo.reset()
    schedule = schedules.one_f_one_b(2, 2)
    try:
        with within(LIMIT):
            found = fxsched.verify(model, schedule, *model.inputs(), batch_norm="batch")
    except PlanError as error:
        return Row(name, "refused", " ".join(str(error).split()))
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        kind = "skipped" if torch_fails_too(model, error) else "crashed"
        return Row(name, kind, f"{type(error).__name__}: {first}")
    return Row(name, "equal" if found.passed else "wrong", _text(found))


def torch_fails_too(model: Model, error: Exception) -> bool:
    """Whether torch.compile does without fxsched, over a batch of any size."""
    torch._dynamo.reset()
    x = model.inputs()
    for each in x:
        torch._dynamo.mark_dynamic(each, 0)
    try:
        torch.compile(model, backend="aot_eager")(*x)
    except Exception as other:
        return type(other) is type(error)
    return False


def _text(found: fxsched.Verification) -> str:
    departs = [each.name for each in found.differences if not each.passed]
    return f"{', '.join(departs)}: {' '.join(found.why.split())}" if departs else ""


def models() -> dict[str, Callable[[], Iterator[Sample]]]:
    """The samples of every operator and module, by name."""
    found: dict[str, Callable[[], Iterator[Sample]]] = {}
    for info in methods.op_db:
        name = f"{info.name}.{info.variant_test_name}".rstrip(".")
        found[f"op {name}"] = partial(operator_samples, info)
    for each in common_modules.module_db:
        found[f"module {each.name}"] = partial(module_samples, each)
    return found


def main() -> int:
    """Runs them, and prints what is not equal."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.torch_tables", description=__doc__
    )
    parser.add_argument("names", nargs="*", help='such as "op cumsum"; all, if none')
    parser.add_argument("--only", choices=("op", "module"), default="")
    parser.add_argument("-v", action="store_true", help="also what is skipped")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("fxsched").setLevel(logging.ERROR)
    every, start = models(), time.perf_counter()
    chosen = options.names or [n for n in every if n.startswith(options.only)]
    for name in chosen:
        if name not in every:
            near = difflib.get_close_matches(name, every, 3)
            parser.error(f"no row {name!r}; did you mean {', '.join(near) or 'op ..'}?")
    kinds: dict[str, Counter[str]] = {"op": Counter(), "module": Counter()}
    for name in chosen:
        row = verdict(name, every[name]())
        kinds[name.split()[0]][row.kind] += 1
        if row.kind not in ("equal", "skipped") or options.v:
            print(f"{row.kind}: {row.name}: {row.why[:300]}", flush=True)
    for table, counts in kinds.items():
        text = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)
        print(f"{table}s: {counts.total()}: {text}")
    print(f"{time.perf_counter() - start:.0f} s")
    return int(any(each["wrong"] + each["crashed"] for each in kinds.values()))


if __name__ == "__main__":
    sys.exit(main())
