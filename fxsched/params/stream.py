"""A model's whole state, one tensor after another."""

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
    """The entries of full_state_dict(model), without holding more than one of them.

    model: compiled or not. rank: who gets the values, None for all ranks; the others
        get the names, and None.

    Every rank goes through all of it: `for name, value in stream_state_dict(model, 0)`.
    Tensors are copies on the CPU; each is sent when it is asked for, and one that has
    several names comes under each of them. A rank that leaves before the end ends the
    others with an error that says so. Raises PlanError if another rank calls something
    else.
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
