"""What ranks call a step with: the same everywhere, or what one of them gives.

Besides the checksums of the first calls, every message carries a number made of a few
elements of each input, so that a rank that has left out a call is found out.
"""

from __future__ import annotations

import ctypes
import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ir.graphs import Role, State
from ..ir.request import CheckInputs
from ..jobs.job import PlanError
from ..transport.checksums import digest
from ..transport.processes import Processes

FIRST = 3  # calls of each plan that check_inputs="first" compares
SAMPLES = 64  # about as many elements of an input are what messages are marked by


class InputRule(NamedTuple):
    """How ranks come to run on the same inputs.

    check: which calls are compared.
    source: the rank whose inputs all take, or None.
    """

    check: CheckInputs = "first"
    source: int | None = None


class Agreement:
    """Makes sure that the ranks run each call of a step on the same inputs.

    inputs: those of the traced graph that are no state of the model.
    number: the plan's, on all ranks.
    local: whether each rank has rows of its own; their shapes alone are compared.
    """

    def __init__(
        self,
        rule: InputRule,
        inputs: Sequence[State],
        processes: Processes,
        number: int,
        local: bool = False,
    ) -> None:
        self.rule, self.inputs, self.processes = rule, inputs, processes
        self.number, self.local = number, local
        self.calls = 0

    def __call__(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments to run on. Raises PlanError on every rank if they differ."""
        self.calls += 1
        self.processes.run(self.number)
        if self.rule.source is not None:
            return self._received(args, self.rule.source)
        if self.rule.check == "never":
            return args
        if self.rule.check == "always" or self.calls <= FIRST:
            self._compare(args)
        self.processes.run(self.number, self._sample(args))
        return args

    def _sample(self, args: Sequence[Any]) -> int:
        """A number, not 0, that is equal for equal inputs and hardly for others."""
        checksum = 0
        for each in self.inputs:
            checksum = zlib.crc32(_elements(self._compared(args, each)), checksum)
        return checksum + 1

    def _compare(self, args: Sequence[Any]) -> None:
        digests = [digest(self._compared(args, each)) for each in self.inputs]
        by_rank = self.processes.all(digests)
        for rank, others in enumerate(by_rank):
            if others != by_rank[0]:
                pairs = zip(self.inputs, others, by_rank[0], strict=True)
                names = [each.name for each, one, other in pairs if one != other]
                raise _differ(rank, names)

    def _compared(self, args: Sequence[Any], each: State) -> Any:
        value = args[each.input]
        rows = self.local and each.role is Role.BATCH
        return f"{value.dtype} {tuple(value.shape)}" if rows else value

    def _received(self, args: Sequence[Any], source: int) -> tuple[Any, ...]:
        values = list(args)
        ranks = range(self.processes.workers)
        for index, *_ in self.inputs:
            if self.processes.rank != source:
                values[index] = torch.empty_like(args[index])
            self.processes.share(values[index], source, ranks)
        return tuple(values)


def _elements(value: Any) -> bytes:
    """A few elements of an input, for which nothing is copied or waited for."""
    if not isinstance(value, Tensor):
        return repr(value).encode()
    if value.device.type != "cpu" or not value.numel():
        return b""
    each = math.ceil(SAMPLES ** (1 / max(1, value.dim())))  # along each dimension
    steps = tuple(slice(None, None, -(-size // each)) for size in value.shape)
    some = value.detach()[steps].contiguous()
    return ctypes.string_at(some.data_ptr(), some.nbytes)


def _differ(rank: int, names: Sequence[str]) -> PlanError:
    return PlanError(
        f"rank {rank} calls the model with other values of {', '.join(names)} than "
        "rank 0, and a step would mix them; every rank passes the same whole batch, "
        "which the schedule divides. The usual cause is a DistributedSampler, or a "
        "shuffle that each rank seeds for itself: take an ordinary sampler with one "
        "seed, or backend(input_from=0), which runs all ranks on rank 0's inputs"
    )
