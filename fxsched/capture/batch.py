"""What of a call is the batch: which arguments, and along which dimension.

Attributes, closures and globals are state. Tensors in the arguments are the batch along
dimension 0 if all have one length there. What departs from that is declared by
backend(batch_dims=) or refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..ir.request import Request
from ..jobs import PlanError
from .caller import Argument, Call, Dims, parts
from .graph_inputs import origin_of, placeholders, symbol_of


@dataclass(frozen=True)
class Batch:
    """How a call is cut into microbatches.

    microbatches: how many.
    rows: samples of a microbatch.
    dims: the dimension along which each input that is cut has its samples, by position.
    full, part: what each symbolic size is in the call, and in one microbatch.
    """

    microbatches: int
    rows: int
    dims: dict[int, int] = field(default_factory=dict)
    full: dict[Any, int] = field(default_factory=dict)
    part: dict[Any, int] = field(default_factory=dict)

    @property
    def symbols(self) -> set[Any]:
        """The symbolic sizes that are others in a microbatch than in the call."""
        return {s for s in self.part if self.part[s] != self.full[s]}

    def changes(self, size: object) -> bool:
        """Whether a size is another in a microbatch than in the call."""
        return bool(self._of(size, self.part) != self._of(size, self.full))

    def size(self, size: object, value: int) -> int:
        """What a size that is `value` in the call is in one microbatch."""
        return int(self._of(size, self.part)) if self.changes(size) else value

    def whole(self, size: object) -> int | None:
        """What a size is in the call, if that is known."""
        value = self._of(size, self.full)
        return int(value) if value.is_number else None

    def joins(self, size: object) -> bool:
        """Whether microbatches' sizes add up to that of the call."""
        return bool(
            self.microbatches * self._of(size, self.part) == self._of(size, self.full)
        )

    def _of(self, size: object, values: dict[Any, int]) -> Any:
        expression = _expression(size)
        return 0 if expression is None else expression.subs(values)


def batch_of(gm: fx.GraphModule, inputs: Sequence[Any], request: Request) -> Batch:
    """How the inputs of Dynamo's graph are cut into the request's microbatches.

    Raises PlanError if that isn't known, if the batch doesn't divide, or if the model
    fixes its size.
    """
    count = request.schedule.microbatches
    tensors = user_tensors(gm, inputs)
    _check_names(gm.meta["call"], request.batch_dims)
    if count == 1:
        rows = inputs[tensors[0]].shape[0] if tensors else 0
        return Batch(1, rows, dict.fromkeys(tensors, 0))
    if not tensors:
        raise PlanError(
            f"the model has no tensor input to cut into {count} microbatches; "
            "pass it the batch, with samples along dimension 0"
        )
    length, cut = samples_of(gm, inputs, request)
    if length % count or length == 0:
        whole = length == 0 or request.ragged == "error"
        if whole or (request.ragged == "pad" and length > 1):
            name = next(e.name for e in cut if e.length == length)
            raise _ragged(name, length, count)
        count = max(n for n in range(1, count + 1) if length % n == 0)
    return _bind(gm, inputs, cut, count, length // count)


def samples_of(
    gm: fx.GraphModule, inputs: Sequence[Any], request: Request
) -> tuple[int, list[Entry]]:
    """How many samples a call has, and the tensors that have them.

    Raises PlanError if that isn't known.
    """
    table = _Table(gm, inputs, request.batch_dims)
    return table.length(), table.cut


def resized(
    gm: fx.GraphModule, inputs: Sequence[Any], new: dict[int, Tensor]
) -> tuple[Any, ...]:
    """The inputs with other tensors in the place of some, of other lengths, and the
    sizes among the inputs accordingly."""
    nodes = placeholders(gm)
    result = [new.get(i, value) for i, value in enumerate(inputs)]
    lengths = _lengths(nodes, result)
    for i, node in enumerate(nodes):
        if not isinstance(result[i], Tensor):
            expression = _expression(node.meta.get("example_value"))
            if expression is not None:
                result[i] = int(expression.subs(lengths))
    return tuple(result)


def _ragged(name: str, length: int, count: int) -> PlanError:
    return PlanError(
        f"input {name} has a batch of {length}, which does not divide into "
        f"{count} microbatches; pass a multiple of {count} or another "
        "Schedule(microbatches=). If it is the last, smaller batch of an epoch: "
        "DataLoader(drop_last=True) leaves it out, fxsched.backend(schedule, "
        "ragged='fewer') runs it in as many microbatches as divide it, and "
        "ragged='pad' fills it up where the model returns rows and no loss"
    )


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
    own: tuple[Argument, ...] = node.meta.get("arguments", ())
    return own or (Argument(origin_of(node).name),)


def dim_of(argument: Argument, tensor: Tensor, dims: Dims) -> int | None:
    """The dimension along which an argument has its samples; None if it has none."""
    key = argument.key(dims)
    dim = 0 if key is None else dims[key]
    known = dim is not None and -tensor.dim() <= dim < tensor.dim()
    return dim % tensor.dim() if dim is not None and known else None


def _check_names(call: Call, dims: Dims) -> None:
    known = [parts(name) for name in call.names]
    for key in dims:
        if isinstance(key, str):
            own = parts(key)
            if any(name[: len(own)] == own for name in known):
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


class Entry(NamedTuple):
    """A tensor of the call, and the dimension with its samples."""

    input: int
    name: str
    shape: tuple[int, ...]
    dim: int | None
    declared: bool

    @property
    def length(self) -> int:
        return 0 if self.dim is None else self.shape[self.dim]


class _Table:
    """The tensors of a call, by what the rule and the user say of them."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], dims: Dims) -> None:
        self.dims = dims
        nodes = placeholders(gm)
        self.entries = [
            self._entry(i, names_of(nodes[i]), inputs[i])
            for i in user_tensors(gm, inputs)
        ]
        self.cut = [entry for entry in self.entries if entry.dim is not None]
        for node, value in zip(nodes, inputs, strict=True):
            if isinstance(value, Tensor) and value.dim() == 0:
                for argument in node.meta.get("arguments", ()):
                    self._check_dim(argument, value)

    def _check_dim(self, argument: Argument, tensor: Tensor) -> None:
        """Raises PlanError for a dimension that a tensor doesn't have."""
        key = argument.key(self.dims)
        dim = None if key is None else self.dims[key]
        if dim is not None and not -tensor.dim() <= dim < tensor.dim():
            raise PlanError(
                f"backend(batch_dims={{{key!r}: {dim}}}): {argument.name} has no "
                f"dimension {dim}; its shape is {list(tensor.shape)}"
            )

    def _entry(self, i: int, names: Sequence[Argument], tensor: Tensor) -> Entry:
        shape = tuple(tensor.shape)
        for argument in names:
            self._check_dim(argument, tensor)
        found = {dim_of(argument, tensor, self.dims) for argument in names}
        if len(found) > 1:
            raise PlanError(
                f"{' and '.join(a.name for a in names)} are one tensor, of which "
                "batch_dims says different things; pass a clone() for one of them"
            )
        first = names[0]
        declared = any(argument.key(self.dims) is not None for argument in names)
        return Entry(i, first.name, shape, found.pop(), declared)

    def length(self) -> int:
        """How many samples there are: the length of all, or what others are multiples
        of.

        Raises PlanError if arguments that nothing is declared of differ in length.
        """
        if not self.cut:
            raise PlanError(
                "backend(batch_dims=) says of all arguments that microbatches share "
                "them; one must be the batch, or Schedule(microbatches=1)"
            )
        if len({e.length for e in self.cut if not e.declared}) > 1:
            raise self._differ()
        least = min(self.cut, key=lambda e: e.length)
        for entry in self.cut:
            if least.length and entry.length % least.length:
                raise PlanError(
                    f"{entry.name} has length {entry.length} along dimension "
                    f"{entry.dim}, which is no multiple of the {least.length} of "
                    f"{least.name}, so its rows can't be told apart by samples:\n"
                    f"{self._shapes()}\n"
                    "pass as many rows for each sample, or say with backend(batch_dims="
                    "{..: None}) what all microbatches share"
                )
        return least.length

    def _shapes(self) -> str:
        width = max(len(entry.name) for entry in self.entries)
        return "\n".join(f"  {e.name:<{width}}  {list(e.shape)}" for e in self.entries)

    def _differ(self) -> PlanError:
        lengths = dict.fromkeys(e.length for e in self.cut if not e.declared)
        lines = "".join(
            f"  if a batch is {n} samples:  fxsched.backend(schedule, "
            f"batch_dims={{{self._line(n)}}})\n"
            for n in [n for n in lengths if n > 1][:4]
        )
        return PlanError(
            "arguments of the model differ in length along dimension 0, so it isn't "
            f"known which of them are cut into microbatches:\n{self._shapes()}\n"
            f"say it, in the way of\n{lines}"
            "the dimension is the one with the samples, or a multiple of them in "
            "order; None is for what all microbatches share"
        )

    def _line(self, batch: int) -> str:
        """What batch_dims should say, as far as shapes tell."""
        said = dict(self.dims)
        for entry in self.cut:
            if not entry.declared and entry.length != batch:
                said[entry.name] = _guess(entry, batch)
        return ", ".join(f"{_quoted(key)}: {dim}" for key, dim in said.items())


def _quoted(key: str | int) -> str:
    return f'"{key}"' if isinstance(key, str) else str(key)


def _guess(entry: Entry, batch: int) -> int | None:
    """Where a tensor may have its samples."""
    if entry.shape[0] == 1 or not batch:
        return None
    if entry.shape[0] % batch == 0:
        return 0
    return entry.shape.index(batch) if batch in entry.shape else None


def _bind(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    cut: Sequence[Entry],
    count: int,
    rows: int,
) -> Batch:
    """The batch, after a look at whether the model lets its size change."""
    nodes = placeholders(gm)
    full = _lengths(nodes, inputs)
    dims = {entry.input: entry.dim for entry in cut if entry.dim is not None}
    sizes = {i: _shape(nodes[i])[dim] for i, dim in dims.items()}
    part = dict(full)
    for entry in cut:
        symbol = symbol_of(sizes[entry.input])
        if symbol is not None:
            part[symbol] = entry.length // count
    batch = Batch(count, rows, dims, full, part)
    fixed = [
        entry
        for entry in cut
        if batch.size(sizes[entry.input], entry.length) * count != entry.length
    ]
    if fixed:
        raise _fixed(nodes[fixed[0].input], fixed[0], len(fixed) == len(cut))
    _check_apart(nodes, inputs, batch)
    return batch


def _lengths(nodes: Sequence[fx.Node], inputs: Sequence[Any]) -> dict[Any, int]:
    """What each symbolic size of the inputs is in this call."""
    full: dict[Any, int] = {}
    for tensors in (False, True):  # which know better what is in the place of another
        for node, value in zip(nodes, inputs, strict=True):
            if isinstance(value, Tensor) is tensors:
                for size, actual in _sizes(node, value):
                    symbol = symbol_of(size)
                    if symbol is not None:
                        full[symbol] = int(actual)
    return full


def _shape(node: fx.Node) -> tuple[Any, ...]:
    return tuple(node.meta["example_value"].shape)


def _sizes(node: fx.Node, value: Any) -> Iterator[tuple[Any, int]]:
    """Symbolic sizes of an input, beside what they are in this call."""
    if isinstance(value, Tensor):
        yield from zip(_shape(node), value.shape, strict=True)
    else:
        yield node.meta.get("example_value"), value


def _expression(size: object) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else None


def _check_apart(nodes: Sequence[fx.Node], inputs: Sequence[Any], batch: Batch) -> None:
    """Raises PlanError if another dimension must be as long as the batch."""
    for i, (node, value) in enumerate(zip(nodes, inputs, strict=True)):
        for dim, (size, _) in enumerate(_sizes(node, value)):
            is_batch = not isinstance(value, Tensor) or batch.dims.get(i) == dim
            if not is_batch and batch.changes(size):
                raise PlanError(
                    f"the model takes dimension {dim} of {names_of(node)[0].name}, of "
                    f"shape {list(value.shape)}, for as long as the batch, but only "
                    f"{_said(i, batch)} is cut into microbatches; compare samples with "
                    "each other outside the model, or use Schedule(microbatches=1)"
                )


def _said(i: int, batch: Batch) -> str:
    dim = batch.dims.get(i)
    return "the rest of the batch" if dim is None else f"its dimension {dim}"


def _fixed(node: fx.Node, entry: Entry, alone: bool) -> PlanError:
    environment = node.meta["example_value"].fake_mode.shape_env
    fixed = {s for s, r in environment.replacements.items() if r.is_number}
    lines = [
        re.sub(r"  # \S*?([^/\s]+:\d+ in \w+).*", r"  # \1", str(guard.sloc))
        for guard in environment.guards
        if guard.expr.free_symbols and guard.expr.free_symbols <= fixed
    ]
    where = f" by\n  {lines[0]}\n" if lines else " by the model, "
    if alone:
        return PlanError(
            f"the batch size is fixed to {entry.length}{where}so the batch cannot be "
            "cut into microbatches; take sizes from the input's shape (x.shape[0], or "
            "-1) instead"
        )
    return PlanError(
        f"the length {entry.length} of {entry.name} is fixed{where}but it is as long "
        "as the batch and would be cut into microbatches; if all of them share it, "
        f'write\n  fxsched.backend(schedule, batch_dims={{"{entry.name}": None}})\n'
        "else take sizes from its shape"
    )
