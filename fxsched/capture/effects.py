"""What an operation writes into, beside what it takes."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor, fx

from ..costmodel.costs import Meter
from ..ir.graphs import operation_name, tensors
from ..rows.tracker import Tracker

BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")


class EffectMeter(Meter):  # type: ignore[no-untyped-call]
    """Counts what operations take, and notes what they write into."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self.written: list[Tensor] = []
        self.tracker = tracker
        self.learned: list[Tensor] = []  # of these, running statistics

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for position, name in _written(func):
            self.written += tensors(args[position : position + 1])
            self.written += tensors((kwargs or {}).get(name))
        # their schemas do not say that running statistics are written in training
        if operation_name(func).removeprefix("aten::") in BATCH_NORMS and args[5]:
            self.learned += [*tensors(args[3]), *tensors(args[4])]
            self.written += self.learned
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.tracker.see(func, args, kwargs or {}, out)
        return out


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operation writes into."""
    schema = getattr(func, "_schema", None)
    return tuple(
        (i, argument.name)
        for i, argument in enumerate(schema.arguments if schema else ())
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def writes_first(node: fx.Node) -> bool:
    """Whether a node writes into its first argument."""
    return 0 in [position for position, _ in _written(node.target)]


def holds_tensor(value: object) -> bool:
    """Whether a value is a tensor, or a list or tuple with one in it."""
    return any(True for _ in tensors(value))
