"""Shards beside DTensors of parallelize_module: steps in turns, then memory.

`peers` and `memory` of these contestants: fxsched's, in microbatches, two of which are
on their way at a time, and of the whole batch at once; and PyTorch's, also of both, and
with the vocabulary in parts too: embedding, head and loss ("head"), which fxsched cuts
where that should be faster.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

from .memory import PAIRS, table, usages
from .ours import TENSOR_PARALLEL

SIZES = (
    *("workers", "microbatches", "layers", "width", "length", "vocabulary", "batch"),
)
NAMES = ("shards", "shards-whole", *TENSOR_PARALLEL)
MEMORY = ("shards", "torch-tp-head", "shards-whole", "torch-tp-head-whole")


def each(
    options: argparse.Namespace, launch: Callable[[int, Sequence[str]], int]
) -> int:
    """Starts the race, then each contestant once more alone."""
    sizes = [
        word for name in SIZES for word in (f"--{name}", str(getattr(options, name)))
    ]
    race = ["peers", *sizes, "--only", *options.only]
    race += ["--steps", str(options.steps), "--alone-every", "4"]
    if launch(options.workers, race):
        return 1
    alone = partial(launch, options.workers)
    wanted = {*options.only, *PAIRS.values()}
    in_memory = [name for name in MEMORY if name in wanted]
    found = usages(in_memory, alone, ["memory", *sizes])
    if found is None:
        return 1
    print(table(found, PAIRS))
    return 0
