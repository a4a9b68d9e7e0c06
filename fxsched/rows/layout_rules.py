"""Rules for operations that move values without computing: where the rows go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .kinds import UNKNOWN, Effect, Kind, OpCall, Rows, Rule, first_cause


def reshaped(call: OpCall) -> Rows:
    """view, flatten and such: the order of the elements stays."""
    tensor, rows = _first(call)
    if rows.kind is not Kind.APART:
        return rows
    before = math.prod(map(int, tensor.shape[: rows.dim])) * rows.outer
    reach = 1
    for dim, size in enumerate(map(int, call.out.shape)):
        if reach * size > before or (call.size == 1 and reach * size == before):
            outer, rest = divmod(before, reach)
            if rest or size % (outer * call.size):
                break
            return rows._replace(dim=dim, outer=outer)
        reach *= size
    return _lost(rows)


def permuted(call: OpCall) -> Rows:
    """Dimensions in another order."""
    tensor, rows = _first(call)
    count = tensor.dim()
    dims = [d % count for d in call.get("dims")]
    return rows._replace(dim=dims.index(rows.dim)) if count else rows


def transposed(call: OpCall) -> Rows:
    """Two dimensions change places."""
    tensor, rows = _first(call)
    count = tensor.dim()
    if count < 2:
        return rows
    a, b = call.get("dim0", 0) % count, call.get("dim1", 1) % count
    return rows._replace(dim={a: b, b: a}.get(rows.dim, rows.dim))


def expanded(call: OpCall) -> Rows:
    """expand and repeat; repeated along the batch, its rows come again as a block."""
    tensor, rows = _first(call)
    shift = call.out.dim() - tensor.dim()
    times = call.get("repeats")
    outer = rows.outer
    if times is not None and rows.kind is Kind.APART:
        outer *= int(times[rows.dim + shift])
    return rows._replace(dim=rows.dim + shift, outer=outer)


def unsqueezed(call: OpCall) -> Rows:
    """A new dimension of length 1."""
    _, rows = _first(call)
    dim = call.get("dim") % call.out.dim()
    return rows._replace(dim=rows.dim + (rows.dim >= dim))


def squeezed(call: OpCall) -> Rows:
    """Without some dimensions of length 1."""
    tensor, rows = _first(call)
    dims = call.get("dim")
    if dims is None:
        dims = range(tensor.dim())
    count = tensor.dim()
    gone = {d % count for d in ([dims] if isinstance(dims, int) else dims) if count}
    gone = {d for d in gone if int(tensor.shape[d]) == 1}
    if rows.kind is Kind.APART and rows.dim in gone:
        if call.size > 1:
            return _lost(rows)
        gone.discard(rows.dim)  # of a batch of one row; its true shape keeps it
    return rows._replace(dim=rows.dim - sum(d < rows.dim for d in gone))


def selected(call: OpCall) -> Rows:
    """One place of a dimension, which goes."""
    tensor, rows = _first(call)
    dim = call.get("dim") % tensor.dim()
    if rows.kind is not Kind.APART or dim != rows.dim:
        return rows._replace(dim=rows.dim - (dim < rows.dim))
    if rows.outer * call.size == int(tensor.shape[dim]) > call.size == 1:
        return _lost(rows)
    return Rows(Kind.OTHER, cause=call.mixed(Effect.ORDER, rows))


def sliced(call: OpCall) -> Rows:
    """A range of a dimension."""
    tensor, rows = _first(call)
    dim = call.get("dim", 0) % tensor.dim()
    if rows.kind is not Kind.APART or dim != rows.dim:
        return rows
    size, taken = int(tensor.shape[dim]), int(call.out.shape[dim])
    if size == taken:
        return rows
    block = call.size * call.inner(tensor, rows)
    start = int(call.get("start") or 0)
    whole = taken > 0 and start % block == 0 and taken % block == 0
    if call.get("step", 1) == 1 and whole:
        return rows._replace(outer=taken // block)
    return Rows(Kind.OTHER, cause=call.mixed(Effect.ORDER, rows))


def parted(call: OpCall) -> Rows | Sequence[Rows]:
    """split, chunk: parts along one dimension."""
    tensor, rows = _first(call)
    dim = call.get("dim", 0) % tensor.dim()
    if rows.kind is not Kind.APART or dim != rows.dim:
        return rows
    block = call.size * call.inner(tensor, rows)
    sizes = [int(part.shape[dim]) for part in call.out]
    if any(size % block for size in sizes) or 0 in sizes:
        return Rows(Kind.OTHER, cause=call.mixed(Effect.ORDER, rows))
    return [rows._replace(outer=size // block) for size in sizes]


def windowed(call: OpCall) -> Rows:
    """unfold: windows along one dimension, their elements along a new last one."""
    tensor, rows = _first(call)
    if rows.kind is Kind.APART and call.get("dimension") % tensor.dim() == rows.dim:
        return rows._replace(cause=call.mixed(Effect.MIX, rows))
    return rows


def diagonal(call: OpCall) -> Rows:
    """Two dimensions become one, at their end."""
    tensor, rows = _first(call)
    gone = {call.get(name, i) % tensor.dim() for i, name in enumerate(("dim1", "dim2"))}
    if rows.kind is Kind.APART and rows.dim in gone:
        return Rows(Kind.OTHER, cause=call.mixed(Effect.ORDER, rows))
    return rows._replace(dim=rows.dim - sum(d < rows.dim for d in gone))


def strided(call: OpCall) -> Rows:
    """as_strided, where it keeps the shape."""
    tensor, rows = _first(call)
    return rows if call.out.shape == tensor.shape else _lost(rows)


def joined(call: OpCall) -> Rows:
    """cat: along the batch, rows of several tensors lie in blocks."""
    tensors: list[Tensor] = [t for t in call.get("tensors") if t.numel()]
    dim = call.get("dim", 0) % call.out.dim()
    values = [call.of(tensor) for tensor in tensors]
    rows = alike(call, values)
    if rows.kind is not Kind.APART or rows.dim != dim:
        return rows
    inner = {call.inner(t, r) for t, r in zip(tensors, values, strict=True)}
    if len(inner) > 1 or any(r.kind is Kind.SHARED for r in values):
        return _lost(rows)
    return rows._replace(outer=sum(r.outer for r in values))


def stacked(call: OpCall) -> Rows:
    """Values side by side along a new dimension."""
    rows = alike(call, [call.of(tensor) for tensor in call.get("tensors")])
    dim = call.get("dim", 0) % call.out.dim()
    return rows._replace(dim=rows.dim + (rows.dim >= dim))


def alike(call: OpCall, values: Sequence[Rows]) -> Rows:
    """Rows of several values side by side, each as it is."""
    apart = [rows for rows in values if rows.kind is Kind.APART]
    reduced = [rows for rows in values if rows.reduced]
    cause = first_cause(values)
    if not apart:
        kinds = {rows.kind for rows in reduced}
        kinds |= {Kind.MEAN for rows in values if rows.kind is Kind.SHARED}
        if len(kinds) == 1:
            return Rows(kinds.pop(), cause=cause)
        return Rows(Kind.OTHER, cause=call.mixed(Effect.BOTH, *values))
    if reduced:
        cause = call.mixed(Effect.STATISTICS, *reduced, *apart)
    cat = call.name == "cat"
    if len({rows.dim if cat else rows.place for rows in apart}) > 1:
        cause = call.mixed(Effect.PAIRS, *values)
    numbers = any(rows.numbers for rows in apart)
    return apart[0]._replace(cause=cause, numbers=numbers)


def _first(call: OpCall) -> tuple[Any, Rows]:
    tensor = call.args[0]
    return tensor, call.of(tensor)


def _lost(rows: Rows) -> Rows:
    """Rows of which no one dimension is known any more."""
    return UNKNOWN._replace(cause=rows.cause)


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten"),
        reshaped,
    ),
    "permute": permuted,
    **dict.fromkeys(("transpose", "t", "swapaxes"), transposed),
    **dict.fromkeys(("expand", "repeat"), expanded),
    "unsqueeze": unsqueezed,
    "squeeze": squeezed,
    "select": selected,
    "slice": sliced,
    **dict.fromkeys(
        (
            *("split", "split_with_sizes", "chunk"),
            *("unsafe_split", "unsafe_split_with_sizes"),
        ),
        parted,
    ),
    "unbind": selected,
    "as_strided": strided,
    "unfold": windowed,
    "diagonal": diagonal,
    "cat": joined,
    "stack": stacked,
}
