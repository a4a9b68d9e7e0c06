"""Weights that ranks have in parts, one for each shard of a stage.

Each part is a parameter of its own, which ranks own as they own whole ones (see
ownership.py). The weight is one NaN on every rank, and refuses as one that another rank
keeps, but its .grad is that of the parts that are here, and so is the weight itself in
an optimizer's step, and in fxsched.local_parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from ..ir.graphs import Spec
from ..ir.parts import Cut, KeptParts
from ..jobs.job import PlanError
from .ownership import (
    CHANGES,
    FILLS,
    OWNERSHIPS,
    Ownership,
    exchanged,
    has_hooks,
    is_given_up,
    nothing,
    refuse,
    spec_of,
)
from .unmade import forget, make


class Parts(NamedTuple):
    """The parts of a weight.

    parts: of all shards; those of others are one NaN each. kept: numbers of those here.
    values: of these: of one in its shape, of several [how many, *shape of one].
    """

    cut: Cut
    parts: tuple[Tensor, ...]
    kept: tuple[int, ...]
    values: Tensor

    @property
    def place(self) -> KeptParts:
        """How the weight is cut, and who keeps and updates each part."""
        entries = [OWNERSHIPS[part] for part in self.parts]
        owners = tuple(entry.owners for entry in entries)
        return KeptParts(self.cut, owners, tuple(entry.updater for entry in entries))

    def local(self, whole: Tensor) -> Tensor:
        """Of a tensor like the weight, what is here, as `values` is."""
        return stacked([self.cut.part(whole, p) for p in self.kept])

    def one(self, local: Tensor, number: int) -> Tensor:
        """A part that is here of a tensor like `values`; another tensor as it is."""
        stacked = self.kept[1:] and local.shape == self.values.shape
        return local[self.kept.index(number)] if stacked else local

    def whole(self, *parts: Tensor) -> Tensor:
        """All of a tensor of which these are the parts; the first of others."""
        cut = parts[0].shape == self.parts[0].shape
        return self.cut.joined(parts) if cut else parts[0]


CUTS: MutableMapping[Tensor, Parts] = WeakIdKeyDictionary()
HOOKS = ("register_hook", "register_post_accumulate_grad_hook")


def cut_weight(
    name: str, weight: Tensor, place: KeptParts, rank: int, turn: int
) -> None:
    """Leaves a rank the parts of a weight that it keeps.

    turn: ranks take turns to speak for whole weights.
    """
    refuse_hooks(name, weight)
    cut, owners, _ = place
    spec = spec_of(weight)
    kept = tuple(p for p, ranks in enumerate(owners) if rank in ranks)
    if kept:
        make(weight)
    else:
        forget(weight)
    values = weight.data.new_empty(0)
    if kept:
        with torch.no_grad():
            values = stacked([cut.part(weight.data, p) for p in kept]).clone()
    some = cut.of(torch.empty(spec.shape, dtype=spec.dtype, device="meta"))
    part_spec = Spec.of(some[0])._replace(device=spec.device)
    own = Parts(cut, tuple(_empty_parts(weight, part_spec, cut.parts)), kept, values)
    for number in kept:
        own.parts[number].data = own.one(values, number)
    for number, part in enumerate(own.parts):
        OWNERSHIPS[part] = Ownership(owners[number], part_spec)
        hook = partial(_hand_on, TensorWeakRef(weight), number)
        part.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    everyone = sorted({each for ranks in owners for each in ranks})
    first = turn % len(everyone)
    OWNERSHIPS[weight] = Ownership((*everyone[first:], *everyone[:first]), spec)
    CUTS[weight] = own
    weight.data = nothing(weight).expand(spec.shape)
    parts = f"parts {', '.join(map(str, kept))}" if kept else "no part"
    refuse(weight, f"{parts} of {name}, which ranks have in {cut.parts} parts")
    for method in FILLS:
        setattr(weight, method, MethodType(_filling(method), weight))
    for method in (*CHANGES, *HOOKS):
        setattr(weight, method, MethodType(_refusal(name, method), weight))


def is_newest(tensor: Tensor, rank: int) -> bool:
    """Whether a rank has all of a tensor's newest values."""
    return tensor not in CUTS and rank in OWNERSHIPS[tensor].newest


def piece(tensor: Tensor, number: int) -> Tensor:
    """A part of a tensor, by its number; all of it, if it isn't cut."""
    return CUTS[tensor].parts[number] if tensor in CUTS else tensor


def parts_here(tensor: Tensor) -> dict[int, Tensor]:
    """The parts of a tensor that are here, by their numbers; all of it as number 0, if
    it isn't cut."""
    own = CUTS.get(tensor)
    return {0: tensor} if own is None else {p: own.parts[p] for p in own.kept}


def pieces_of(tensor: Tensor, value: Any) -> dict[int, Any]:
    """The parts that are here of what belongs to a tensor, by their numbers: of its
    gradient, or of an optimizer's state of it. All as number 0, if it isn't cut."""
    if tensor not in CUTS:
        return {0: value}
    own = CUTS[tensor]
    return {p: mapped_alike(partial(own.one, number=p), value) for p in own.kept}


def joined(tensor: Tensor, values: Sequence[Any]) -> Any:
    """What belongs to a tensor, of what belongs to its parts, in their order."""
    if tensor not in CUTS:
        return values[0]
    return mapped_alike(CUTS[tensor].whole, *values)


def mapped_alike(change: Callable[..., Any], *values: Any) -> Any:
    """What `change` makes of the tensors of values that are alike, however deep."""
    first = values[0]
    if isinstance(first, Tensor):
        return change(*values)
    if isinstance(first, dict):
        return {key: mapped_alike(change, *(v[key] for v in values)) for key in first}
    if type(first) in (list, tuple):
        return type(first)(
            mapped_alike(change, *each) for each in zip(*values, strict=True)
        )
    return first


@contextmanager
def local_parts(model: nn.Module) -> Iterator[None]:
    """Where parameters that ranks have in parts are the parts that this rank keeps,
    and may be read and written: `with fxsched.local_parts(model): ...`.

    A parameter has the shape of a part then; [how many, *shape], if it keeps several;
    as its .grad always has. Parameters that it keeps no part of stay as they are, or
    old copies of what another rank steps, and so do all where the process has
    everything. The model isn't called meanwhile.
    """
    with present(model.parameters()):
        yield


@contextmanager
def present(weights: Iterable[Tensor]) -> Iterator[None]:
    here = [weight for weight in weights if weight in CUTS and _newest(CUTS[weight])]
    try:
        with exchanged(here, [CUTS[weight].values for weight in here]):
            yield
    finally:
        for weight in here:
            _note_written(weight)


def _newest(own: Parts) -> bool:
    """Whether a rank has newest values of the parts that it keeps, and keeps some."""
    return any(not is_given_up(own.parts[number]) for number in own.kept)


def put(weight: Tensor, whole: Tensor) -> None:
    """Takes the values of a weight that is cut."""
    own = CUTS[weight]
    if own.kept:
        with torch.no_grad():
            own.values.copy_(own.local(whole))
        _note_written(weight)


def _note_written(weight: Tensor) -> None:
    """Says to autograd that parts were written, as views that it doesn't know."""
    for part in CUTS[weight].parts:
        torch.autograd.graph.increment_version(part)


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Several parts as one tensor, [how many, *shape of one]; one as it is."""
    return torch.stack(list(parts)) if parts[1:] else parts[0]


def _filling(method: str) -> Callable[..., Any]:
    """What fills a weight, and leaves this rank its parts of that."""
    real = getattr(Tensor, method)

    def fill(weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        put(weight, real(spec_of(weight).empty(), *args, **kwargs))
        return weight

    return fill


def _refusal(name: str, method: str) -> Callable[..., Any]:
    def refuse(weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        remedy = "call it in `with fxsched.local_parts(model)`"
        if method in HOOKS:
            remedy = "leave the weight whole by shards={names: ..}"
        raise PlanError(
            f"{name}.{method}: ranks have {name} in parts, of which no rank sees all; "
            f"{remedy}"
        )

    return refuse


def refuse_hooks(name: str, weight: Tensor) -> None:
    """Raises PlanError for hooks on the gradient of a weight, which gets none."""
    if has_hooks(weight):
        raise PlanError(
            f"{name} has a hook on its gradient, which ranks have in parts; leave the "
            "weight whole by shards={names: ..}, or remove the hook"
        )


def _empty_parts(weight: Tensor, spec: Spec, count: int) -> Iterator[Tensor]:
    for _ in range(count):
        value = nothing(weight).expand(spec.shape)
        yield nn.Parameter(value, weight.requires_grad)


def _hand_on(reference: TensorWeakRef, number: int, part: Tensor) -> None:
    """Moves a part's gradient to the .grad of the weight, which has its shape then."""
    weight = reference()
    gradient, part.grad = part.grad, None
    if weight is None or gradient is None:
        return
    own = CUTS[weight]
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
    weight.data = CUTS[weight].values  # it must have the gradient's shape at that time
    weight.grad = gradient
    weight.data = whole


@contextmanager
def hidden_gradients() -> Iterator[None]:
    """Where weights that ranks have in parts have no .grad."""
    gradients = {w: w.grad for w in list(CUTS) if w.grad is not None}
    for weight in gradients:
        weight.grad = None
    try:
        yield
    finally:
        for weight, gradient in gradients.items():
            _set_gradient(weight, gradient)
