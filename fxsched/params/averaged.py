"""torch.optim.swa_utils.AveragedModel of a model that ranks have between them.

Each rank averages what it keeps: the average has the owners of the model's parameters,
and no memory for those of other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import Tensor, nn

from ..jobs.job import PlanError
from ..torch_compat.averages import around_averages
from .record import are_placed, note, record_of
from .released import exchanged, give_up, has_memory, is_given_up

Pairs = list[tuple[str, Tensor, Tensor]]  # name, average, what it is of


def share_averages() -> None:
    """From now on AveragedModel averages what this rank keeps."""

    def is_placed(model: nn.Module) -> bool:
        return are_placed(chain(model.parameters(), model.buffers()))

    around_averages(is_placed, _copying, _averaging)


@contextmanager
def _copying(averaged: Any, model: nn.Module) -> Iterator[None]:
    with _left_out(list(chain(model.parameters(), model.buffers()))):
        yield
    for name, average, tensor in _pairs(averaged, model):
        _follow(name, average, tensor)


@contextmanager
def _averaging(averaged: Any, model: nn.Module) -> Iterator[None]:
    pairs = _pairs(averaged, model)
    for name, average, tensor in pairs:
        _follow(name, average, tensor)
    apart = [p[1:] for p in pairs if is_given_up(p[1]) or is_given_up(p[2])]
    with _left_out(list(chain(*apart)), keep=False):
        yield


def _pairs(averaged: Any, model: nn.Module) -> Pairs:
    """Parameters and buffers, each once, in the order of update_parameters."""
    named = list(chain(model.named_parameters(), model.named_buffers()))
    cut = next((name for name, tensor in named if record_of(tensor).parts), None)
    if cut is not None:
        raise PlanError(
            f"AveragedModel has no average of {cut}, which ranks have in parts; "
            "average a model without shards, or in fxsched.local_parts(model)"
        )
    averages = chain(averaged.module.parameters(), averaged.module.buffers())
    return [(n, a, t) for a, (n, t) in zip(averages, named, strict=True)]


def _follow(name: str, average: Tensor, tensor: Tensor) -> None:
    """Has an average be where its parameter or buffer is."""
    record, before = record_of(tensor), record_of(average)
    if not record.owners or (before.owners and before.behind >= record.behind):
        return
    note(average, **record.place)
    if is_given_up(tensor) and not is_given_up(average):
        give_up(name, average, values=not has_memory(tensor))


@contextmanager
def _left_out(tensors: list[Tensor], keep: bool = True) -> Iterator[None]:
    """Where what this rank has given up, and what else is named, may be read and
    written: in the place of values that it lacks there is nothing.

    keep: whether to leave values in their place that are out of date.
    """
    chosen = [t for t in tensors if is_given_up(t)] if keep else tensors
    values = [t.data if keep and has_memory(t) else t.data.new_empty(0) for t in chosen]
    with exchanged(chosen, values):
        yield
