"""Streams a model's whole state, one tensor after another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ..transport.processes import everyone
from .full_state import digest_of, gathered, module_of, plain_name, readers_of
from .record import record_of


def stream_state_dict(
    model: nn.Module, rank: int | None = None
) -> Iterator[tuple[str, Any]]:
    """Yields the entries of full_state_dict(model), one tensor after another.

    model: the model, compiled or not.
    rank: the only rank that gets the values; the other ranks get the names, and None.
        None: all ranks get the values.

    Every rank must iterate to the end: `for name, value in stream_state_dict(model,
    0)`. Tensors are copies on the CPU. Each tensor is sent when the iteration reaches
    it; a tensor with several names is yielded under each name. If one rank stops before
    the end, the others raise an error. Raises PlanError if another rank calls another
    function.
    """
    module = module_of(model)
    entries = module.state_dict(keep_vars=True)
    kept = [value for value in entries.values() if _is_kept(value)]
    if not kept:
        for name, value in entries.items():
            yield plain_name(name), _copied(value)
        return
    processes = everyone("stream_state_dict")
    processes.agree(f"stream_state_dict of {digest_of(kept)}, rank={rank}", None)
    readers = readers_of("stream_state_dict", processes, rank)
    name = ""
    try:
        for name, value in entries.items():
            if _is_kept(value):
                value = gathered(processes, value, readers)
            yield (
                plain_name(name),
                _copied(value if processes.rank in readers else None),
            )
    except GeneratorExit:
        if name != next(reversed(entries)):
            processes.fail(
                ConnectionError(
                    f"rank {processes.rank} left stream_state_dict after "
                    f"{plain_name(name)}; go through all of it on every rank"
                )
            )
        raise


def _is_kept(value: object) -> bool:
    return isinstance(value, Tensor) and bool(record_of(value).owners)


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
