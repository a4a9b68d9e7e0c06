"""What is known of parameters and buffers: one record of each.

Records are found by tensor, which is what PyTorch hands to hooks, optimizers and
clipping. They are of all models of this process: a model may have several backends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef

from ..ir.graphs import Spec
from ..ir.parts import Cut, KeptParts


class Lazy(NamedTuple):
    """What makes the values of a tensor that has none yet.

    spec: what the tensor is to be.
    address, version: of the NaN in its place, and how often that had been written.
    then: what is done once it is made, or was given memory.
    """

    spec: Spec
    values: Callable[[], Tensor]
    address: int = 0
    version: int = 0
    then: Callable[[], None] | None = None


class Parts(NamedTuple):
    """What ranks have of a weight in its place: a part for each shard of a stage.

    parts: of all shards, each with a record of its own; those of others are one NaN.
    kept: numbers of those here.
    values: of these: of one in its shape, of several [how many, *shape of one].
    """

    cut: Cut
    parts: tuple[Tensor, ...]
    kept: tuple[int, ...]
    values: Tensor

    @property
    def place(self) -> KeptParts:
        """How the weight is cut, and who keeps and updates each part."""
        records = [record_of(part) for part in self.parts]
        owners = tuple(record.owners for record in records)
        return KeptParts(self.cut, owners, tuple(record.updater for record in records))

    def local(self, whole: Tensor) -> Tensor:
        """Of a tensor like the weight, what is here, as `values` is."""
        return stacked([self.cut.part(whole, p) for p in self.kept])

    def one(self, local: Tensor, number: int) -> Tensor:
        """A part that is here of a tensor like `values`; another tensor as it is."""
        several = self.kept[1:] and local.shape == self.values.shape
        return local[self.kept.index(number)] if several else local

    def whole(self, *parts: Tensor) -> Tensor:
        """All of a tensor of which these are the parts; the first of others."""
        cut = parts[0].shape == self.parts[0].shape
        return self.cut.joined(parts) if cut else parts[0]


@dataclass(frozen=True)
class Record:
    """A parameter or buffer, or a part of a weight.

    name: the first of its names in the model that was planned last; "" before.
    workers: how many ranks there are; 0 until a plan places it.
    owners: those that keep it.
    spec: its shape, strides and type where it is kept.
    updater: the worker that updates it, if the schedule's u says.
    behind: whether the other owners get its new values in the next call alone, and not
        when it is updated.
    parts: those that ranks have in its place.
    lazy: what makes its values, until they are made.
    stepped: whether programs step it, so that a call leaves it no gradient.
    lacks: what this rank has instead of its newest values, in words.
    hooked: whether a hook refuses gradients from outside of the model.
    """

    name: str = ""
    workers: int = 0
    owners: tuple[int, ...] = ()
    spec: Spec | None = None
    updater: int | None = None
    behind: bool = False
    parts: Parts | None = None
    lazy: Lazy | None = None
    stepped: bool = False
    lacks: str | None = None
    hooked: bool = False

    @property
    def place(self) -> dict[str, Any]:
        """What holds for its copies too: who keeps and updates it, and what it is."""
        names = ("name", "workers", "owners", "spec", "updater", "behind")
        return {name: getattr(self, name) for name in names}

    @property
    def updaters(self) -> tuple[int, ...]:
        """The workers that update it, and keep the optimizer's state of it."""
        return self.owners if self.updater is None else (self.updater,)

    @property
    def newest(self) -> tuple[int, ...]:
        """The workers that have its newest values between calls."""
        return self.updaters if self.behind else self.owners

    @property
    def speaker(self) -> int:
        """The rank that speaks for it: the one that updates it, or its first owner;
        rank 0 for a tensor that no program reads."""
        return self.updaters[0] if self.owners else 0

    @property
    def source(self) -> int:
        """The first rank that has its newest values; rank 0 for a tensor that no
        program reads."""
        return self.newest[0] if self.owners else 0

    def is_updated(self, rank: int) -> bool:
        """Whether a rank updates it; each does what no program reads."""
        return not self.owners or rank in self.updaters

    @property
    def is_updated_by_all(self) -> bool:
        """Whether each rank updates all of it."""
        return self.parts is None and len(self.updaters) >= self.workers

    def is_newest(self, rank: int) -> bool:
        """Whether a rank has all of its newest values."""
        return self.parts is None and rank in self.newest


_NOTHING = Record()


class _Records:
    """Records by tensor, each for as long as its tensor lives.

    A WeakIdKeyDictionary makes a weak reference whenever it is asked, and each call
    asks for each parameter several times.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[WeakIdRef, Record]] = {}  # by id

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, tensor: Tensor) -> Record:
        """What is known of a tensor."""
        known = self._kept.get(id(tensor))
        return _NOTHING if known is None else known[1]

    def __setitem__(self, tensor: Tensor, record: Record) -> None:
        number, kept = id(tensor), self._kept
        known = kept.get(number)
        if known is None:
            reference = WeakIdRef(tensor, partial(kept.pop, number))
        else:
            reference, _ = known
        kept[number] = reference, record

    def items(self) -> Iterator[tuple[Tensor, Record]]:
        """The tensors and their records."""
        for reference, record in list(self._kept.values()):
            tensor = reference()
            if tensor is not None:
                yield tensor, record


RECORDS = _Records()


def record_of(tensor: Tensor) -> Record:
    """What is known of a tensor; nothing, of one that no plan and no deferred() had."""
    return RECORDS.get(tensor)


def note(tensor: Tensor, **fields: Any) -> Record:
    """Writes fields into the record of a tensor; the new record."""
    record = RECORDS[tensor] = replace(record_of(tensor), **fields)
    return record


def parts_of(weight: Tensor) -> Parts:
    """The parts of a weight that is cut."""
    parts = record_of(weight).parts
    assert parts is not None, "the weight is cut"
    return parts


def are_placed(tensors: Iterable[Tensor]) -> bool:
    """Whether ranks have some of these between them."""
    return any(record_of(tensor).owners for tensor in tensors)


def placed(values: Sequence[Any]) -> list[tuple[int, Record]]:
    """Records of the tensors among some values that a plan has placed, by position."""
    known = ((i, record_of(v)) for i, v in enumerate(values) if isinstance(v, Tensor))
    return [(i, record) for i, record in known if record.owners]


def spec_of(tensor: Tensor) -> Spec:
    """What a tensor is where it is kept, or will be once it is made."""
    record = record_of(tensor)
    spec = record.lazy.spec if record.lazy else record.spec
    if spec is None:
        return Spec.of(tensor)
    return spec._replace(dtype=tensor.dtype, device=tensor.device)


def specs_of(values: Sequence[Any]) -> dict[int, Spec]:
    """What tensors among some values, that may be otherwise here, are where they are
    kept, by position."""
    return {
        i: spec_of(value)
        for i, value in enumerate(values)
        if isinstance(value, Tensor)
        and (record_of(value).owners or record_of(value).lazy)
    }


def piece(tensor: Tensor, number: int) -> Tensor:
    """A part of a tensor, by its number; all of it, if it isn't cut."""
    parts = record_of(tensor).parts
    return tensor if parts is None else parts.parts[number]


def pieces_of(tensor: Tensor, value: Any) -> dict[int, Any]:
    """The parts that are here of what belongs to a tensor, by their numbers: of its
    gradient, or of an optimizer's state of it. All as number 0, if it isn't cut."""
    parts = record_of(tensor).parts
    if parts is None:
        return {0: value}
    return {p: mapped_alike(partial(parts.one, number=p), value) for p in parts.kept}


def joined(tensor: Tensor, values: Sequence[Any]) -> Any:
    """What belongs to a tensor, of what belongs to its parts, in their order."""
    parts = record_of(tensor).parts
    return values[0] if parts is None else mapped_alike(parts.whole, *values)


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


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Several parts as one tensor, [how many, *shape of one]; one as it is."""
    return torch.stack(list(parts)) if parts[1:] else parts[0]
