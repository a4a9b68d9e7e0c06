"""Weights that ranks have in parts, one for each shard of a stage.

Each part is a parameter of its own, which ranks own as they own whole ones. The weight
is one NaN on every rank, and refuses as one that another rank keeps, but its .grad is
that of the parts that are here, and so is the weight itself in an optimizer's step, and
in fxsched.local_parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from ..ir.graphs import Spec
from ..ir.parts import KeptParts
from ..jobs.job import PlanError
from .intercepted import CHANGES, FILLS, HOOKS, intercept
from .lazy import forget, make
from .record import RECORDS, Parts, note, parts_of, record_of, spec_of, stacked
from .released import exchanged, has_hooks, is_given_up, refuse, release_memory


def cut_weight(
    name: str, weight: Tensor, place: KeptParts, rank: int, workers: int, turn: int
) -> tuple[Tensor, ...]:
    """Leaves a rank of so many workers the parts of a weight that it keeps; all parts.

    turn: ranks take turns to speak for whole weights.
    """
    _refuse_hooks(name, weight)
    cut, owners, _ = place
    spec = spec_of(weight)
    kept = tuple(p for p, ranks in enumerate(owners) if rank in ranks)
    values = weight.data.new_empty(0)
    if kept:
        make(weight)
        with torch.no_grad():
            values = stacked([cut.part(weight.data, p) for p in kept]).clone()
    else:
        forget(weight)
    release_memory(weight, spec)
    some = cut.of(torch.empty(spec.shape, dtype=spec.dtype, device="meta"))
    part_spec = Spec.of(some[0])._replace(device=spec.device)
    parts = Parts(cut, tuple(_empty_parts(weight, part_spec, cut.parts)), kept, values)
    for number in kept:
        parts.parts[number].data = parts.one(values, number)
    for number, part in enumerate(parts.parts):
        placed = {"workers": workers, "owners": owners[number], "spec": part_spec}
        note(part, name=f"{name}[{number}]", **placed)
        hook = partial(_hand_on, TensorWeakRef(weight), number)
        part.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    everyone = sorted({each for ranks in owners for each in ranks})
    first = turn % len(everyone)
    in_turn = (*everyone[first:], *everyone[:first])
    note(weight, name=name, workers=workers, owners=in_turn, spec=spec, parts=parts)
    here = f"parts {', '.join(map(str, kept))}" if kept else "no part"
    refuse(weight, f"{here} of {name}, which ranks have in {cut.parts} parts")
    intercept(weight, FILLS, _fill)
    intercept(weight, CHANGES + HOOKS, _refuse)
    return parts.parts


def follow_cast(weight: Tensor) -> None:
    """Gives the parts of a weight the type and the device that it was moved to."""
    own = record_of(weight).parts
    if own is None or (own.values.dtype, own.values.device) == (
        weight.dtype,
        weight.device,
    ):
        return
    own = own._replace(values=own.values.to(weight))
    for number, part in enumerate(own.parts):
        kept = number in own.kept
        part.data = own.one(own.values, number) if kept else part.data.to(weight)
    note(weight, parts=own)


def parts_here(tensor: Tensor) -> dict[int, Tensor]:
    """The parts of a tensor that are here, by their numbers; all of it as number 0, if
    it isn't cut."""
    own = record_of(tensor).parts
    return {0: tensor} if own is None else {p: own.parts[p] for p in own.kept}


@contextmanager
def local_parts(model: nn.Module) -> Iterator[None]:
    """Makes the parts of weights that this rank keeps readable and writable.

    Inside `with fxsched.local_parts(model):`, a weight that is cut into shards has the
    shape of the part that this rank keeps or, if the rank keeps several parts, [number
    of parts, *shape of a part]. Its .grad always has this shape. Weights of which the
    rank keeps no part are not changed: they may be old copies of weights that another
    rank updates. In a process that has everything, no weight is changed. Don't call the
    model inside the block.
    """
    with present(model.parameters()):
        yield


@contextmanager
def present(weights: Iterable[Tensor]) -> Iterator[None]:
    """As local_parts, for some weights."""
    weights = list(weights)
    for weight in weights:
        follow_cast(weight)
    cut = ((weight, record_of(weight).parts) for weight in weights)
    here = [(weight, parts) for weight, parts in cut if parts and _newest(parts)]
    try:
        with exchanged([w for w, _ in here], [parts.values for _, parts in here]):
            yield
    finally:
        for _, parts in here:
            _note_written(parts)


def _newest(parts: Parts) -> bool:
    """Whether a rank has newest values of the parts that it keeps, and keeps some."""
    return any(not is_given_up(parts.parts[number]) for number in parts.kept)


def put(parts: Parts, whole: Tensor) -> None:
    """Takes the values of a weight that is cut."""
    if parts.kept:
        with torch.no_grad():
            parts.values.copy_(parts.local(whole))
        _note_written(parts)


def _note_written(parts: Parts) -> None:
    """Says to autograd that parts were written, as views that it doesn't know."""
    for part in parts.parts:
        torch.autograd.graph.increment_version(part)


def _fill(weight: Tensor, method: str, *args: Any, **kwargs: Any) -> Tensor:
    """Fills a whole weight, and leaves this rank its parts of that."""
    put(parts_of(weight), getattr(spec_of(weight).empty(), method)(*args, **kwargs))
    return weight


def _refuse(weight: Tensor, method: str, *args: Any, **kwargs: Any) -> Any:
    remedy = "call it in `with fxsched.local_parts(model)`"
    if method in HOOKS:
        remedy = "leave the weight whole by shards={names: ..}"
    name = record_of(weight).name
    raise PlanError(
        f"{name}.{method}: ranks have {name} in parts, of which no rank sees all; "
        f"{remedy}"
    )


def _refuse_hooks(name: str, weight: Tensor) -> None:
    """Raises PlanError for hooks on the gradient of a weight, which gets none."""
    if has_hooks(weight):
        raise PlanError(
            f"{name} has a hook on its gradient, which ranks have in parts; leave the "
            "weight whole by shards={names: ..}, or remove the hook"
        )


def _empty_parts(weight: Tensor, spec: Spec, count: int) -> Iterator[Tensor]:
    for _ in range(count):
        part = nn.Parameter(weight.data.new_empty(0), weight.requires_grad)
        release_memory(part, spec)
        yield part


def _hand_on(reference: TensorWeakRef, number: int, part: Tensor) -> None:
    """Moves a part's gradient to the .grad of the weight, which has its shape then."""
    weight = reference()
    gradient, part.grad = part.grad, None
    if weight is None or gradient is None:
        return
    own = parts_of(weight)
    if weight.grad is not None:
        own.one(weight.grad, number).add_(gradient)
        return
    if own.kept[1:]:
        local = torch.zeros_like(own.values)
        own.one(local, number).copy_(gradient)
        gradient = local
    _set_gradient(weight, gradient)


def _set_gradient(weight: Tensor, gradient: Tensor) -> None:
    whole = weight.data
    weight.data = parts_of(weight).values  # it must have the gradient's shape meanwhile
    weight.grad = gradient
    weight.data = whole


@contextmanager
def hidden_gradients() -> Iterator[None]:
    """Where weights that ranks have in parts have no .grad."""
    weights = [weight for weight, record in RECORDS.items() if record.parts]
    gradients = [(w, w.grad) for w in weights if w.grad is not None]
    for weight, _ in gradients:
        weight.grad = None
    try:
        yield
    finally:
        for weight, gradient in gradients:
            _set_gradient(weight, gradient)
