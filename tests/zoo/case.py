"""What a row of the zoo is: a model, its inputs, and what is compared."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

BATCH, MICROBATCHES = 8, 4
Inputs = Mapping[str, Any] | tuple[Any, ...]
Make = Callable[[], tuple[nn.Module, Inputs]]

# Every worker's rows pass through one model, or through models that take turns.
PIPELINES = ("gpipe", "one_f_one_b", "interleaved", "zb_h1", "graph")
SCHEDULES = (*PIPELINES, "ddp", "fsdp", "lpp", "random")


@dataclass(frozen=True)
class Case:
    """A model that is trained for a step, planned and in plain PyTorch.

    make: the model and its inputs, the same after the same seed.
    schedules: names of the schedules that rows of the table take turns with.
    apart: the loss of the whole batch is that of its microbatches too.
    autocast: the forward pass runs under bfloat16.
    options: what fxsched.backend takes.
    grads: an input's name to whose gradient is compared too.
    """

    name: str
    make: Make
    schedules: tuple[str, ...] = SCHEDULES
    apart: bool = True
    autocast: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        """A number that stays when other rows come and go."""
        return zlib.crc32(self.name.encode())


class Zoo:
    """Rows by name, in the order in which they were added."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.cases: dict[str, Case] = {}

    def add(self, name: str, make: Make, **options: Any) -> None:
        assert name not in self.cases, f"two rows are called {name}"
        self.cases[name] = Case(name, make, **options)

    def __call__(self, **options: Any) -> Callable[[Make], Make]:
        """Adds the decorated function, under its name."""

        def note(make: Make) -> Make:
            self.add(make.__name__.strip("_"), make, **options)
            return make

        return note

    def __iter__(self) -> Iterator[Case]:
        return iter(self.cases.values())
