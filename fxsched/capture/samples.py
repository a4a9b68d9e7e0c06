"""Which arguments of a call have the samples, and along which dimension.

Attributes, closures and globals are state. Tensors in the arguments have samples along
dimension 0 if all have one length there. What departs from that is declared by
backend(batch_dims=) or refused.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..ir.meta import of_node
from ..ir.request import Request
from ..jobs.job import PlanError
from .caller import Argument, Call, Dims, parts
from .graph_inputs import origin_of, placeholders


def samples_of(
    gm: fx.GraphModule, inputs: Sequence[Any], request: Request
) -> tuple[int, list[BatchInput]]:
    """How many samples a call has, and the tensors that have them: as many as all are
    long, or what others are multiples of.

    Raises PlanError if that isn't known.
    """
    dims, entries = request.batch_dims, list[BatchInput]()
    for node, value in zip(placeholders(gm), inputs, strict=True):
        for argument in of_node(node)["arguments"] if isinstance(value, Tensor) else ():
            check_dim(argument, value, dims)
    for i in user_tensors(gm, inputs):
        names = names_of(placeholders(gm)[i])
        dim = _only({dim_of(each, inputs[i], dims) for each in names}, names)
        declared = any(each.key(dims) is not None for each in names)
        shape = tuple(inputs[i].shape)
        entries.append(BatchInput(i, names[0].name, shape, dim, declared))
    cut = [entry for entry in entries if entry.dim is not None]
    if not cut:
        raise PlanError(
            "backend(batch_dims=) gives None for all arguments, so that none of them "
            "is the batch; give a dimension for one of them, or use "
            "Schedule(microbatches=1)"
        )
    if len({e.length for e in cut if not e.declared}) > 1:
        raise _differ(entries, dims, request.schedule.microbatches)
    least = min(cut, key=lambda e: e.length)
    for entry in cut:
        if least.length and entry.length % least.length:
            raise PlanError(
                f"{entry.name} has length {entry.length} along dimension {entry.dim}, "
                f"which is no multiple of {least.length}, the length of {least.name}, "
                "so fxsched can't tell which rows belong to which sample:\n"
                f"{_shapes(entries)}\npass the same number of rows for each sample, or "
                "name the arguments that all microbatches share: "
                "backend(batch_dims={..: None})"
            )
    return least.length, cut


def user_tensors(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[int]:
    """Positions of the tensors with a dimension 0 in the arguments of the call."""
    return [
        i
        for i, node in enumerate(placeholders(gm))
        if isinstance(inputs[i], Tensor)
        and inputs[i].dim() > 0
        and not isinstance(inputs[i], torch.nn.Parameter)
        and origin_of(node).argument
    ]


def names_of(node: fx.Node) -> tuple[Argument, ...]:
    """An input that is an argument, or several, as the user names them."""
    arguments: tuple[Argument, ...] = of_node(node).get("arguments", ())
    return arguments or (Argument(origin_of(node).name),)


def dim_of(argument: Argument, tensor: Tensor, dims: Dims) -> int | None:
    """The dimension along which an argument has its samples; None if it has none."""
    key = argument.key(dims)
    dim = 0 if key is None else dims[key]
    known = dim is not None and -tensor.dim() <= dim < tensor.dim()
    return dim % tensor.dim() if dim is not None and known else None


def symbolic_dim(argument: Argument, tensor: Tensor, request: Request) -> int | None:
    """The dimension whose size is another in a microbatch, if there is one; one row
    can't be cut, and tracers take a length of 1 for a constant."""
    if isinstance(tensor, torch.nn.Parameter) or request.schedule.microbatches == 1:
        return None
    dim = dim_of(argument, tensor, request.batch_dims)
    return dim if dim is not None and tensor.shape[dim] > 1 else None


def check_names(call: Call, dims: Dims) -> None:
    """Raises PlanError for arguments in batch_dims= that the call doesn't have."""
    known = [parts(name) for name in call.names]
    for key in dims:
        if isinstance(key, str):
            path = parts(key)
            if any(name[: len(path)] == path for name in known):
                continue
            near = difflib.get_close_matches(key, call.names, 1)
            near = near or difflib.get_close_matches(key.lower(), call.names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise PlanError(
                f"backend(batch_dims={{{key!r}: ..}}): the model is called without "
                f"{key!r}; its arguments are {', '.join(call.names)}{hint}"
            )
        if not 0 <= key < call.positions:
            raise PlanError(
                f"backend(batch_dims={{{key}: ..}}): the model is called with "
                f"{call.positions} arguments by position; give 0 to "
                f"{call.positions - 1}, or a name"
            )


class BatchInput(NamedTuple):
    """A tensor of the call, and the dimension with its samples."""

    input: int
    name: str
    shape: tuple[int, ...]
    dim: int | None
    declared: bool

    @property
    def length(self) -> int:
        """How long it is along that dimension; 0 without one."""
        return 0 if self.dim is None else self.shape[self.dim]


def check_dim(argument: Argument, tensor: Tensor, dims: Dims) -> None:
    """Raises PlanError for a declared dimension that a tensor doesn't have."""
    key = argument.key(dims)
    dim = None if key is None else dims[key]
    if dim is not None and not -tensor.dim() <= dim < tensor.dim():
        raise PlanError(
            f"backend(batch_dims={{{key!r}: {dim}}}): {argument.name} has no "
            f"dimension {dim}; its shape is {list(tensor.shape)}"
        )


def _only(said: set[int | None], names: Sequence[Argument]) -> int | None:
    """The dimension that is declared of a tensor by all of its names.

    Raises PlanError if that differs.
    """
    if len(said) > 1:
        raise PlanError(
            f"{' and '.join(each.name for each in names)} are one tensor, for which "
            "batch_dims= has different dimensions; pass a clone() for one of them"
        )
    return said.pop()


def _shapes(entries: Sequence[BatchInput]) -> str:
    width = max(len(entry.name) for entry in entries)
    return "\n".join(f"  {e.name:<{width}}  {list(e.shape)}" for e in entries)


def _differ(entries: Sequence[BatchInput], dims: Dims, count: int) -> PlanError:
    """The error for arguments that nothing is declared of and that differ in length."""
    lengths = dict.fromkeys(e.length for e in entries if not e.declared)
    long = [n for n in lengths if n > 1]
    long = [n for n in long if n % count == 0] or long
    lines = "".join(
        f"  if a batch is {n} samples:  fxsched.backend(schedule, "
        f"batch_dims={{{_line(entries, dims, n)}}})\n"
        for n in long[:4]
    )
    return PlanError(
        "arguments of the model differ in length along dimension 0, so fxsched can't "
        f"tell which of them to cut into microbatches:\n{_shapes(entries)}\nwrite one "
        f"of these, for the size of your batch:\n{lines}give the dimension that has "
        "the samples in order, or a fixed number of rows for each sample; give None "
        "for an argument that all microbatches share"
    )


def _line(entries: Sequence[BatchInput], dims: Dims, batch: int) -> str:
    """What batch_dims should say, as far as shapes tell."""
    said = dict(dims)
    for entry in entries:
        if not entry.declared and entry.length != batch:
            said[entry.name] = _guess(entry, batch)
    return ", ".join(f"{json.dumps(key)}: {dim}" for key, dim in said.items())


def _guess(entry: BatchInput, batch: int) -> int | None:
    """Where a tensor may have its samples."""
    if entry.shape[0] == 1 or not batch:
        return None
    if entry.shape[0] % batch == 0:
        return 0
    return entry.shape.index(batch) if batch in entry.shape else None
