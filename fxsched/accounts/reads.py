"""What each line of a step reads, on each worker."""

from __future__ import annotations

from collections.abc import Iterator

from ..ir.step import Message, Op, Value, values_in


def read(line: Op | Message, worker: int) -> Iterator[Value]:
    """What a line reads on a worker; a message, where it is sent."""
    if isinstance(line, Op):
        yield from values_in((line.args, line.after))
    elif line.source == worker:
        yield line.value
