"""The demo: trains models/two_tower.py by a schedule.

Workers are threads, or ranks under `torchrun --nproc-per-node W -m fxsched demo`.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..backend import backend
from ..jobs.job import PlanError
from ..jobs.schedule import Schedule
from ..models import docstrings
from ..models.two_tower import TwoTower, TwoTowerConfig
from ..state.full_state import full_state_dict
from ..transport import processes, world

BATCH = 64
ROWS = 12  # of a worker's program, that are shown
LEARNING_RATE, WEIGHT_DECAY, WARM_UP = 1e-3, 0.01, 20
SEED = 0  # every rank builds the same model and draws the same batches

Batch = tuple[Tensor, Tensor, Tensor]  # code, doc, label
Model = Callable[..., Tensor]


class LargestDifferences(NamedTuple):
    """The largest absolute differences from eager PyTorch."""

    loss: float
    gradients: float


def check(microbatches: int, device: str) -> None:
    """Raises PlanError, before data are read, for what the demo cannot do."""
    if device == "cuda" and not torch.cuda.is_available():
        raise PlanError("--device cuda: torch finds no GPU here; give --device cpu")
    if BATCH % microbatches:
        raise PlanError(
            f"--microbatches {microbatches}: a batch of {BATCH} doesn't divide "
            "into as many; give 1, 2, 4, 8, 16, 32 or 64"
        )


def demo(schedule: Schedule, steps: int, device: str) -> None:
    """Compares one step with eager, trains, and tells how well the model does.

    Raises PlanError for what cannot be planned.
    """
    began = time.perf_counter()
    check(schedule.microbatches, device)
    runner = backend(schedule)
    batches = Batches(docstrings.load(), device)
    say(f"data: {batches}\n")

    torch.manual_seed(SEED)
    config = TwoTowerConfig(vocabulary=len(batches.data.words))
    model = TwoTower(config).to(device)
    eager = copy.deepcopy(model)  # a rank soon keeps only its own parameters
    step: Any = torch.compile(model, backend=runner)
    difference = compare_step(step, model, eager, batches.draw(), schedule.microbatches)
    assert runner.plan is not None
    say(f"{runner.plan}\n\n{runner.plan.table(0, jobs=ROWS)}\n")

    say(f"accuracy before training: {accuracies(step, batches)}")
    run_training(step, model, batches, steps)
    say(f"accuracy after training: {accuracies(step, batches)}")
    plain = TwoTower(config).to(device)
    plain.load_state_dict(full_state_dict(model))  # as a file would hold it
    say(f"its state in plain PyTorch: {accuracies(plain, batches)}")
    say(
        f"largest difference from eager: loss {difference.loss:.1e}, "
        f"gradients {difference.gradients:.1e}"
    )
    say(f"{time.perf_counter() - began:.0f} seconds")
    processes.leave()


class Batches:
    """What to train on and what to judge, the same on every rank, on a device."""

    def __init__(self, data: docstrings.Data, device: str) -> None:
        self.data, self.device = data, device
        self.generator = torch.Generator().manual_seed(SEED)
        every = max(1, len(data.train_code) // len(data.held_out_code))
        train = data.train_code[::every], data.train_doc[::every]
        held_out = data.held_out_code, data.held_out_doc
        self.judged = {
            "train": self._to_device(docstrings.pairs(*train, SEED)),
            "held-out": self._to_device(docstrings.pairs(*held_out, SEED)),
        }

    def __str__(self) -> str:
        return (
            f"{len(self.data.train_code):,} functions of Python's standard library and "
            f"their docstrings, {len(self.data.held_out_code):,} more held out"
        )

    def draw(self) -> Batch:
        """The next batch to train on."""
        pairs = self.data.train_code, self.data.train_doc
        return self._to_device(docstrings.batch(*pairs, BATCH, self.generator))

    def _to_device(self, batch: Batch) -> Batch:
        code, doc, label = (tensor.to(self.device) for tensor in batch)
        return code, doc, label


def compare_step(
    step: Model, model: nn.Module, eager: nn.Module, batch: Batch, microbatches: int
) -> LargestDifferences:
    """One step both ways from equal parameters, on the same microbatches."""
    loss = step(*batch)
    loss.backward()  # type: ignore[no-untyped-call]
    expected = torch.zeros_like(loss)
    for part in zip(*(tensor.chunk(microbatches) for tensor in batch), strict=True):
        part_loss = eager(*part) / microbatches
        part_loss.backward()
        expected += part_loss.detach()
    gradients = torch.tensor(
        [
            -1.0 if mine.grad is None else _distance(mine.grad, its.grad)
            for mine, its in zip(model.parameters(), eager.parameters(), strict=True)
        ]
    ).nan_to_num(torch.inf)
    # each gradient is on the ranks that keep its parameter
    gradients = world.largest(gradients)
    assert gradients.min() >= 0, "a parameter got no gradient on any worker"
    model.zero_grad()
    return LargestDifferences(abs((loss - expected).item()), gradients.max().item())


def _distance(mine: Tensor, its: Tensor | None) -> float:
    assert its is not None, "eager has no gradient here"
    return float((mine - its).abs().max())


def run_training(step: Model, model: nn.Module, batches: Batches, steps: int) -> None:
    """An ordinary training loop."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY
    )
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / WARM_UP, max(0.02, 1 - i / steps))
    )
    every = max(1, steps // 8)
    bar = tqdm(range(1, steps + 1), "train", disable=not speaks())
    for i in bar:
        loss = step(*batches.draw())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.4f}")
        if i in (1, steps) or i % every == 0:
            say(f"step {i:4}: loss {loss.item():.6f}")


def accuracies(step: Model, batches: Batches) -> str:
    """The accuracy on each set of pairs, as text."""
    shares = [f"{k} {accuracy(step, v):.3f}" for k, v in batches.judged.items()]
    return f"{', '.join(shares)} (chance 0.500)"


@torch.no_grad()
def accuracy(step: Model, pairs: Batch) -> float:
    """The share of pairs that the model judges right, in batches of one size."""
    code, doc, label = pairs
    right = 0
    for first in range(0, len(label), BATCH):
        rows = torch.arange(first, first + BATCH, device=label.device) % len(label)
        hits = (step(code[rows], doc[rows]) > 0) == (label[rows] > 0.5)
        right += int(hits[: len(label) - first].sum())  # the rest wrapped around
    return right / len(label)


def speaks() -> bool:
    """Whether this process prints: of torchrun's ranks, the first."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Prints a line above the bar, on the process that speaks."""
    if speaks():
        tqdm.write(text)
