"""How a call is cut into microbatches, and what sizes become in one of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from ..ir.graphs import name_of, tensors
from ..ir.request import Request
from ..ir.written import written
from ..jobs.job import PlanError
from ..placement.kinds import Cause, Effect, Kind, Rows
from ..placement.tracker import Tracker
from .graph_breaks import FixedBatch
from .graph_inputs import origin_of, placeholders, symbol_of
from .samples import BatchInput, check_names, names_of, samples_of, user_tensors


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
    def symbols(self) -> dict[Any, int]:
        """The symbolic sizes that are others in a microbatch than in the call, and how
        many times its rows each is."""
        part, full = self.part, self.full
        return {s: part[s] // self.rows for s in part if part[s] != full[s]}

    def changes(self, size: object) -> bool:
        """Whether a size is another in a microbatch than in the call."""
        return bool(self._of(size, self.part) != self._of(size, self.full))

    def size(self, size: object, value: int) -> int:
        """What a size that is `value` in the call is in one microbatch."""
        return int(self._of(size, self.part)) if self.changes(size) else value

    def part_of(self, size: object) -> int | None:
        """What a size is in one microbatch, if that is known."""
        if not isinstance(size, torch.SymInt):
            return int(size)  # type: ignore[call-overload, no-any-return]
        value = self._of(size, self.part)
        return max(int(value), 0) if value.is_number else None

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
        expression = expression_of(size)
        return 0 if expression is None else expression.subs(values)


def batch_of(gm: fx.GraphModule, inputs: Sequence[Any], request: Request) -> Batch:
    """How the inputs of the model's graph are cut into the request's microbatches.

    Raises PlanError if that isn't known, if the batch doesn't divide, or if the model
    fixes its size.
    """
    count = request.schedule.microbatches
    tensors = user_tensors(gm, inputs)
    check_names(gm.meta["call"], request.batch_dims)
    if count == 1:
        rows = inputs[tensors[0]].shape[0] if tensors else 0
        return Batch(1, rows, dict.fromkeys(tensors, 0))
    if not tensors:
        raise no_tensors(count)
    length, cut = samples_of(gm, inputs, request)
    if length % count or length == 0:
        whole = length == 0 or request.ragged == "error"
        if whole or (request.ragged == "pad" and length > 1):
            name = next(e.name for e in cut if e.length == length)
            raise _ragged(name, length, count)
        count = max(n for n in range(1, count + 1) if length % n == 0)
    return _bind(gm, inputs, cut, count, length // count)


def no_tensors(count: int) -> PlanError:
    """The error for a call without a batch."""
    return PlanError(
        f"the model has no tensor input to cut into {count} microbatches; "
        "pass it the batch, with samples along dimension 0"
    )


def fixed_size(
    gm: fx.GraphModule, inputs: Sequence[Any], request: Request
) -> FixedBatch | None:
    """The error for a model whose graph fixes the batch size, if it does; what else is
    wrong with a batch is said when it is planned.

    Called inside a torch.compile backend, where int(size) would fix a size.
    """
    known = [v.node.hint if isinstance(v, torch.SymInt) else v for v in inputs]
    try:
        batch_of(gm, known, request)
    except FixedBatch as error:
        return error
    except PlanError:
        return None
    return None


def resized(
    gm: fx.GraphModule, inputs: Sequence[Any], new: dict[int, Tensor]
) -> tuple[Any, ...]:
    """The inputs with other tensors in the place of some, of other lengths, and the
    sizes among the inputs accordingly."""
    nodes = placeholders(gm)
    result = [new.get(i, value) for i, value in enumerate(inputs)]
    lengths = lengths_of(nodes, result)
    for i, node in enumerate(nodes):
        if not isinstance(result[i], Tensor):
            expression = expression_of(node.meta.get("example_value"))
            if expression is not None:
                result[i] = int(expression.subs(lengths))
    return tuple(result)


def _ragged(name: str, length: int, count: int) -> PlanError:
    fewer = max(m for m in range(1, count + 1) if length % m == 0)
    return PlanError(
        f"input {name} has a batch of {length}, which does not divide into "
        f"{count} microbatches; pass a multiple of {count}, or take "
        f"Schedule(microbatches={fewer}). For the last, smaller batch of an epoch: "
        "DataLoader(drop_last=True) leaves it out, fxsched.backend(schedule, "
        "ragged='fewer') runs it in as many microbatches as divide it, and "
        "ragged='pad' fills it up where the model returns rows and no loss"
    )


def _bind(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    cut: Sequence[BatchInput],
    count: int,
    rows: int,
) -> Batch:
    """The batch, after a look at whether the model lets its size change."""
    nodes = placeholders(gm)
    full = lengths_of(nodes, inputs)
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
        alone = len(fixed) == len(cut)
        shared = [i for i in user_tensors(gm, inputs) if i not in dims]
        like = [i for i in shared if inputs[i].shape[0] == fixed[0].length and alone]
        names = [names_of(nodes[i])[0].name for i in like]
        raise _fixed(nodes[fixed[0].input], fixed[0], alone, names)
    _check_apart(nodes, inputs, batch)
    return batch


def lengths_of(nodes: Sequence[fx.Node], inputs: Sequence[Any]) -> dict[Any, int]:
    """What each symbolic size of the inputs is in this call."""
    full: dict[Any, int] = {}
    for better in (False, True):  # tensors know what is in the place of another
        for node, value in zip(nodes, inputs, strict=True):
            if isinstance(value, Tensor) is better:
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


def expression_of(size: object) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else None


def _check_apart(nodes: Sequence[fx.Node], inputs: Sequence[Any], batch: Batch) -> None:
    """Raises PlanError if another dimension must be as long as the batch."""
    for i, (node, value) in enumerate(zip(nodes, inputs, strict=True)):
        for dim, (size, _) in enumerate(_sizes(node, value)):
            is_batch = not isinstance(value, Tensor) or batch.dims.get(i) == dim
            if not is_batch and batch.changes(size):
                if i not in batch.dims and origin_of(node).argument:
                    raise _left_whole(names_of(node)[0].name, dim)
                raise PlanError(
                    f"the model needs dimension {dim} of {names_of(node)[0].name}, of "
                    f"shape {list(value.shape)}, to be as long as the batch, but only "
                    f"{_said(i, batch)} is cut into microbatches; compare samples with "
                    "each other outside the model, or use Schedule(microbatches=1)"
                )


def _or_cut(shared: Sequence[str]) -> str:
    if not shared:
        return ""
    dims = ", ".join(f'"{name}": 0' for name in shared)
    return (
        "; or, if there is a value (or row number) for each sample, write "
        f"fxsched.backend(schedule, batch_dims={{{dims}}})"
    )


def _said(i: int, batch: Batch) -> str:
    dim = batch.dims.get(i)
    return "the rest of the batch" if dim is None else f"its dimension {dim}"


def _left_whole(name: str, dim: int) -> PlanError:
    """What to say of an argument that shall not be cut, and has a value by sample."""
    return PlanError(
        f"the model needs dimension {dim} of {name} to be as long as the batch, but "
        f"batch_dims= gives all of {name} to each microbatch; write "
        f'fxsched.backend(schedule, batch_dims={{"{name}": {dim}}}), also if {name} '
        "has row numbers, which then pick rows of the whole batch"
    )


def _fixed(
    node: fx.Node, entry: BatchInput, alone: bool, shared: Sequence[str]
) -> PlanError:
    """The error for a model that fixes the size of the batch, or of one input of it.

    shared: arguments that microbatches share, and that are as long as the batch.
    """
    environment = node.meta["example_value"].fake_mode.shape_env
    fixed = {s for s, r in environment.replacements.items() if r.is_number}
    lines = [
        re.sub(r"  # \S*?([^/\s]+:\d+ in \w+).*", r"  # \1", str(guard.sloc))
        for guard in environment.guards
        if guard.expr.free_symbols and guard.expr.free_symbols <= fixed
    ]
    line = lines[0].strip() if lines else ""
    of_shape = "take sizes from the input's shape (x.shape[0], or -1, not len(x))"
    where = f" by\n  {lines[0]}\n" if lines else " by the model, "
    if alone:
        return FixedBatch(
            f"the batch size is fixed to {entry.length}{where}so the batch cannot be "
            f"cut into microbatches; {of_shape}{_or_cut(shared)}",
            f"{line} (it fixes the batch size)".strip(),
        )
    return FixedBatch(
        f"the length {entry.length} of {entry.name} is fixed{where}but it is as long "
        "as the batch and would be cut into microbatches; if all of them share it, "
        f'write\n  fxsched.backend(schedule, batch_dims={{"{entry.name}": None}})\n'
        f"else {of_shape}",
        f"{line} (it fixes the batch size)".strip(),
    )


def has_sizes(value: Any, example: Any, batch: Batch) -> bool:
    """Whether a microbatch's value has the sizes that Dynamo's symbols say."""
    found, wanted = list(tensors(value)), list(tensors(example))
    if len(found) != len(wanted):
        return not wanted  # of an operation of ours Dynamo knows nothing
    return all(
        size in (part, None)
        for a, b in zip(found, wanted, strict=True)
        for part, size in zip(a.shape, map(batch.part_of, b.shape), strict=False)
    )


def stand_ins(
    node: fx.Node, batch: Batch, tracker: Tracker, values: Mapping[fx.Node, Any]
) -> Any:
    """Values of the sizes that the symbols say, in place of what a microbatch can't
    compute: of x.topk(4, 0) or x[3] one of two rows has nothing. None if some sizes are
    not known.

    values: of the microbatch.
    """
    cause = _cause(node)
    example = node.meta.get("example_value")
    shapes = [list(map(batch.part_of, each.shape)) for each in tensors(example)]
    if not shapes or any(None in shape for shape in shapes):
        return None
    if name_of(node.target) == "batch_norm" and "norm" not in node.meta:
        return None  # it is of each microbatch
    read = tensors([values.get(each) for each in node.all_input_nodes])
    learned = [t.as_strided((), ()) for t in read if t.requires_grad]

    def made(value: Any) -> Any:
        if not isinstance(value, Tensor):
            known = isinstance(value, torch.SymInt)
            return batch.part_of(value) if known else value
        shape: Any = tuple(map(batch.part_of, value.shape))
        new = torch.empty(shape, dtype=value.dtype, device=value.device)
        if value.is_floating_point():  # its gradient reaches what the node reads
            new = sum((each.to(value.dtype) for each in learned), new)
        tracker.put(new, Rows(Kind.OTHER, cause=cause))
        return new

    return tree_map(made, example)


def _cause(node: fx.Node) -> Cause:
    target = node.args[0] if node.target is written else node.target
    return Cause(Effect.ORDER, name_of(target), node.meta.get("stack_trace"))
