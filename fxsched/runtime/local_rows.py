"""Lets each rank load only the rows of a batch that it reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.data import Sampler

from ..capture.batch import resized
from ..capture.samples import BatchInput, samples_of
from ..ir import ops
from ..ir.request import Request
from ..ir.step import Op
from ..jobs.job import PlanError
from ..jobs.schedule import Schedule
from ..plans.plan import Plan
from ..transport.world import own_rank


class LocalSampler(Sampler[list[int]]):
    """Yields the row numbers that a rank reads of each batch of an epoch.

    Use it as batch_sampler of DataLoader, with fxsched.backend(schedule, rows="local").

    dataset: any object with a length.
    schedule: the Schedule that the model runs by.
    batch: the number of samples of the whole batch, a multiple of the microbatches. The
        samples after the last whole batch are left out.
    rank: the rank; by default that of this process. If one process runs all workers,
        the default is all rows.
    shuffle: whether to shuffle, in the same order on all ranks; set_epoch changes the
        order.
    Raises PlanError for a batch that isn't a multiple of the microbatches, and for a
    dataset smaller than the batch.
    """

    def __init__(
        self,
        dataset: Sized,
        schedule: Schedule,
        batch: int,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        rank = own_rank() if rank is None else rank
        rows = [schedule.local_rows(r, batch) for r in range(schedule.workers)]
        if rank is None:
            self.rows = list(range(batch))
        elif 0 <= rank < schedule.workers:
            self.rows = rows[rank]
        else:
            raise PlanError(
                f"LocalSampler(rank={rank}): give a worker, 0..{schedule.workers - 1}"
            )
        self.length, self.batch = len(dataset), batch
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        if self.length < batch:
            raise PlanError(
                f"LocalSampler(batch={batch}): the dataset has {self.length} samples, "
                "which make no whole batch"
            )

    def set_epoch(self, epoch: int) -> None:
        """Chooses the shuffled order of an epoch; give all ranks the same number."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length // self.batch

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self.length))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.length, generator=generator).tolist()
        for i in range(len(self)):
            whole = order[i * self.batch : (i + 1) * self.batch]
            yield [whole[row] for row in self.rows]


def check_local(plan: Plan, schedule: Schedule) -> None:
    """Raises PlanError if a worker reads rows that it doesn't have. The same on all
    ranks: of the step of all workers, not of one's program."""
    microbatches = [
        set(schedule.local_microbatches(r)) for r in range(schedule.workers)
    ]
    reads = []
    for job, w in plan.placements.items():
        if not job.joint:
            reads.append((w.compute, job.microbatch))
        elif plan.stages.nodes[job.stage]["whole_inputs"]:
            reads += [(w.compute, b) for b in range(schedule.microbatches)]
    for line in plan.lines:
        if isinstance(line, Op) and line.target is ops.rows:
            reads.append((line.worker, line.args[1]))
    for worker, microbatch in reads:
        if microbatch not in microbatches[worker]:
            raise PlanError(
                f"backend(rows='local'): worker {worker} reads rows of microbatch "
                f"{microbatch}, which schedule.local_rows({worker}, ..) leaves out; "
                "give the Schedule the number of its stages, or, where rows of the "
                "whole batch meet in a global-batch stage, pass whole batches on all "
                "ranks"
            )


def spread_rows(
    gm: fx.GraphModule, args: tuple[Any, ...], request: Request, rank: int
) -> tuple[Any, ...]:
    """A call with a rank's rows in their places in the batch of all ranks; in the
    places of others, which it doesn't read, are rows of its own.

    Raises PlanError if the rows don't divide into the rank's microbatches.
    """
    schedule = request.schedule
    microbatches = schedule.local_microbatches(rank)
    if len(microbatches) == schedule.microbatches:
        return args
    if not microbatches:
        raise PlanError(
            f"backend(rows='local'): worker {rank} runs no jobs and has no rows, so it "
            "can't know the size of the batch; pass whole batches on all ranks"
        )
    samples, cut = samples_of(gm, args, request)
    if samples % len(microbatches) or samples < 2:
        raise PlanError(
            f"backend(rows='local'): rank {rank} passes {samples} samples for the "
            f"{len(microbatches)} microbatches that it runs jobs of; pass a multiple, "
            "at least 2, the rows of schedule.local_rows(rank, batch)"
        )
    new = {e.input: _placed(args[e.input], e, microbatches, schedule) for e in cut}
    return resized(gm, args, new)


def _placed(
    tensor: Tensor, entry: BatchInput, microbatches: Sequence[int], schedule: Schedule
) -> Tensor:
    """before: b, d            # microbatches 1 and 3 of 4
    after:  b, b, b, d     # of which 0 and 2 are not read"""
    assert entry.dim is not None
    parts = dict(
        zip(microbatches, tensor.chunk(len(microbatches), entry.dim), strict=True)
    )
    other = parts[microbatches[0]].detach()
    every = range(schedule.microbatches)
    return torch.cat([parts.get(b, other) for b in every], entry.dim)
