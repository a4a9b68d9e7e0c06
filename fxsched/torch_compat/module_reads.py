"""Sees which attributes of modules a model's Python reads while it is traced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

Reads = Mapping[int, set[str]]


@contextmanager
def noted_reads() -> Iterator[Reads]:
    """Notes which attributes of modules are read, by the modules' ids."""
    reads: dict[int, set[str]] = {}

    def noting(module: nn.Module, name: str) -> Any:
        reads.setdefault(id(module), set()).add(name)
        return object.__getattribute__(module, name)

    nn.Module.__getattribute__ = noting  # type: ignore[method-assign, assignment]
    try:
        yield reads
    finally:
        del nn.Module.__getattribute__
