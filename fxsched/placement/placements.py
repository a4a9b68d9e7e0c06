"""Declarations of users' own operators: fxsched.placements and fxsched.keeps_rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils.flop_counter import flop_registry, register_flop_formula

from ..jobs.job import PlanError
from ..jobs.user_values import shown
from .declared import DECLARED, Declared, Strategy
from .kinds import REPLICATE, Kind, Rows

SUMS = {"sum": Kind.SUM, "avg": Kind.MEAN}


def placements(
    op: Any,
    forward: Mapping[Any, Any] | None = None,
    backward: Mapping[Any, Any] | None = None,
    flops: Callable[..., float] | None = None,
) -> None:
    """Declares how an operator of your own may be computed in parts.

    Parts are microbatches of a batch, or shards, for example of attention heads.

    op: an operator of torch.library: its name, such as "mylib::attention",
        torch.ops.mylib.attention, or the result of torch.library.custom_op or
        triton_op. A Triton kernel that the model calls must be in such an operator.
    forward: a dict from the placements of the inputs to those of the outputs:
        {(Shard(0), Replicate()): Shard(0)} if each row of the output depends on the
        same row of the first input. Placements are those of torch.distributed.tensor,
        one for each tensor, or list of tensors, among the arguments and results, in the
        order of the schema: Shard(dim) is a part along a dimension; Replicate() is the
        whole tensor; Partial() is a summand, and Partial("avg") a value to average. An
        argument that is None fits any placement. A whole input with one element along
        the dimension fits Shard.
    backward: a dict from the placements of the outputs' gradients to those of the
        inputs' gradients. By default it follows from forward: Shard stays Shard, and
        the gradient of a Replicate() input is Partial(). {} declares that the
        operator's backward can't be computed in parts.
    flops: a function that returns the floating-point operations of a call. It gets the
        operator's arguments, with the shapes of tensors in place of the tensors.

    Call placements before the model's first call. A call that fits no entry of forward
    runs once, on the rows of the whole batch, and is not split into shards.
    fxsched.verify names an operator whose declaration is wrong. Raises PlanError if op
    isn't an operator, and for placements that don't fit its schema.
    """
    overload = _overload("placements", op)
    what = f"placements({overload}"
    if flops is not None:
        _count_flops(overload, flops)
    if forward is None:
        if backward is not None or flops is None:
            raise PlanError(
                f"{what}): give forward=, such as {{(Shard(0), Shard(0)): Shard(0)}}"
            )
        return
    schema = overload._schema
    given, gives = _places(schema.arguments), _places(schema.returns)
    back = None
    if backward is not None:
        back = _strategies(f"{what}, backward=)", backward, gives, given)
    ahead = _strategies(f"{what}, forward=)", forward, given, gives)
    DECLARED[overload] = Declared(ahead, back)


def keeps_rows(op: Any) -> None:
    """Declares that an operator of your own keeps the rows of a batch apart.

    op: as in fxsched.placements, of which keeps_rows is the short form. Along the
        dimension in which the arguments have their rows, all results must have these
        rows too. Each row of a result may depend only on the same row of the arguments,
        and on arguments without rows.

    Call keeps_rows before the model's first call. Without this declaration the operator
    runs once on the rows of the whole batch, because it may mix them. An operator with
    torch.Tag.pointwise needs no declaration. Raises PlanError if op isn't an operator.
    """
    DECLARED[_overload("keeps_rows", op)] = Declared()


def _places(fields: Sequence[Any]) -> list[str]:
    """The names of an operator's tensors, or their types."""
    places = [field for field in fields if "Tensor" in str(field.type)]
    return [field.name or str(field.type) for field in places]


def _overload(what: str, op: Any) -> OpOverload[Any, Any]:
    """The operator's one overload. Raises PlanError for what is none."""
    found: Any = getattr(op, "_qualname", op)  # of what custom_op gave
    if isinstance(found, str):
        library, _, name = found.partition("::")
        found = getattr(getattr(torch.ops, library, None), name or "?", None)
    names = list(map(str, found)) if isinstance(found, OpOverloadPacket) else []
    if len(names) == 1 or "default" in names:
        found = getattr(found, names[0] if len(names) == 1 else "default")
    if not isinstance(found, OpOverload):
        raise PlanError(
            f"{what}({shown(op)}): give the name of an operation that torch.library "
            'knows, such as "mylib::attention"'
        )
    if found.namespace in ("aten", "prim", "fxsched"):
        raise PlanError(
            f"{what}({shown(op)}): this operator is PyTorch's, and only those of your "
            "own can be described; give one of yours"
        )
    return found


def _strategies(
    what: str, given: object, inputs: Sequence[str], outputs: Sequence[str]
) -> tuple[Strategy, ...]:
    if not isinstance(given, Mapping):
        raise PlanError(
            f"{what}: give placements of outputs by those of inputs, such as "
            f"{{(Shard(0), Shard(0)): Shard(0)}}, not {shown(given)}"
        )
    return tuple(
        Strategy(_placed(what, key, inputs), _placed(what, value, outputs))
        for key, value in given.items()
    )


def _placed(what: str, given: Any, names: Sequence[str]) -> tuple[Rows, ...]:
    several = given if isinstance(given, (tuple, list)) else (given,)
    if len(several) != len(names):
        raise PlanError(
            f"{what}: {shown(given)} has {len(several)} placements for the "
            f"{len(names)} tensors {', '.join(names)}; give one for each"
        )
    return tuple(_rows(what, each) for each in several)


def _rows(what: str, placement: Any) -> Rows:
    kind = type(placement).__name__
    if kind == "Shard":
        return Rows(Kind.SHARD, placement.dim)
    if kind == "Partial" and placement.reduce_op in SUMS:
        return Rows(SUMS[placement.reduce_op])
    if kind == "Replicate":
        return REPLICATE
    raise PlanError(
        f"{what}: {shown(placement)} is no placement; give Shard(dim), Replicate(), "
        'Partial() or Partial("avg") of torch.distributed.tensor'
    )


def _count_flops(overload: OpOverload[Any, Any], flops: object) -> None:
    """Tells PyTorch's own counter, too."""
    if not callable(flops):
        raise PlanError(
            f"placements({overload}, flops={shown(flops)}): give a function of the "
            "operator's arguments, with shapes in the place of tensors"
        )

    def formula(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return int(flops(*args, **kwargs))

    flop_registry.pop(overload.overloadpacket, None)
    register_flop_formula(overload.overloadpacket)(formula)
