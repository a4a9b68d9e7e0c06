"""Batches as they are given to a model, and their microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

Batch = Tensor | Sequence[Any] | Mapping[str, Any]


def microbatch_of(
    batch: Batch, microbatch: int, microbatches: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A microbatch's arguments: tensors are cut along dimension 0."""

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        return value.chunk(microbatches)[microbatch]

    if isinstance(batch, Mapping):
        return (), {name: cut(value) for name, value in batch.items()}
    values = (batch,) if isinstance(batch, Tensor) else batch
    return tuple(map(cut, values)), {}
