"""What the demo trains: its model and data, its learning rate, a call of its loop, and
how well the model does."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from ..backend import backend
from ..equality.stability import stability
from ..jobs.job import Direction, Job, PlanError
from ..jobs.schedule import Schedule
from ..models import docstrings
from ..models.two_tower import TwoTower, TwoTowerConfig

JUDGED = 256  # functions of each part, with their own and with another's docstring
BATCH = 64  # rows that a step of the optimizer is for
LEARNING_RATE, WEIGHT_DECAY, WARM_UP = 1e-3, 0.01, 20
SEED = 0  # every rank builds the same model and draws the same batches

Batch = tuple[Tensor, Tensor, Tensor]  # code, doc, label
Model = Callable[..., Tensor]


def check(schedule: Schedule, device: str) -> None:
    """Raises PlanError, before data are read, for what the demo cannot do."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if device not in ("cpu", found and found.type):
        has = f"torch finds {found.type} here" if found else "torch finds no GPU here"
        other = f" or {found.type}" if found else ""
        raise PlanError(f"--device {device}: {has}; give --device cpu{other}")
    every = schedule.update_every or schedule.microbatches
    if BATCH % every:
        what = f"--microbatches {schedule.microbatches}"
        if schedule.update_every:
            what = f"{schedule.name}: an update every {every} microbatches"
        raise PlanError(
            f"{what}: the demo's batch of {BATCH} doesn't divide into this many; give "
            "1, 2, 4, 8, 16, 32 or 64"
        )


def local_device(kind: str) -> str:
    """The device of a kind that this process takes: ranks of a host share them out."""
    if kind == "cpu":
        return kind
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    index = rank % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)  # which collectives of objects go over
    return f"{kind}:{index}"


class Task:
    """A model that a schedule trains.

    inside: whether the program steps the optimizer; else the loop does.
    updates: steps in a call, each for BATCH rows. calls: for all steps; done: so far.
    step: the compiled model.
    """

    def __init__(
        self,
        schedule: Schedule,
        steps: int,
        device: str = "cpu",
        learning_rate: float | None = None,
        seed: int = SEED,
    ) -> None:
        every = schedule.update_every
        self.schedule, self.inside, self.done = schedule, every is not None, 0
        self.updates = schedule.microbatches // every if every else 1
        self.calls = -(-steps // self.updates)
        self.rates = Rates(schedule, learning_rate, self.calls * self.updates)
        rows = BATCH * self.updates
        self.batches = Batches(docstrings.load(), device, rows, seed)
        torch.manual_seed(seed)
        self.config = TwoTowerConfig(vocabulary=len(self.batches.data.words))
        self.model = TwoTower(self.config).to(device)
        self.optimizer = adamw(self.model, self.rates.learning_rate)
        self.runner = backend(
            schedule,
            optimizer=self.optimizer if self.inside else None,
            profile=True,
        )
        self.step: Any = torch.compile(self.model, backend=self.runner)
        self._scheduler = LambdaLR(
            self.optimizer,
            # of its steps, what the one in the middle would take
            lambda call: self.rates.share(call * self.updates + (self.updates - 1) / 2),
        )

    def train(self, batch: Batch) -> float:
        """A call, and the steps of the optimizer; gives the loss."""
        loss: Tensor = self.step(*batch)
        if not self.inside:
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._scheduler.step()
        self.done += 1
        return loss.item()


def adamw(model: nn.Module, learning_rate: float) -> AdamW:
    """The optimizer of a model."""
    return AdamW(model.parameters(), lr=learning_rate, weight_decay=WEIGHT_DECAY)


class Rates:
    """The learning rate: what is stable of LEARNING_RATE where gradients are late."""

    def __init__(
        self, schedule: Schedule, learning_rate: float | None, steps: int
    ) -> None:
        # a schedule with rates of its own, as PipeMare has, lowers them itself
        self.late = 0 if schedule.rate is not None else staleness(schedule)
        self.steps = steps
        self.learning_rate = learning_rate or LEARNING_RATE * stable_share(self.late)

    def share(self, step: float) -> float:
        """What a step takes of it."""
        return min((step + 1) / WARM_UP, max(0.02, 1 - step / self.steps))

    def __str__(self) -> str:
        text = f"learning rate {self.learning_rate:.3g}"
        if not self.late:
            return text
        return f"{text}, for gradients that are up to {self.late} updates late"


def staleness(schedule: Schedule) -> int:
    """How many updates a gradient's weights are behind those it is applied to, at
    most."""
    every = schedule.update_every or schedule.microbatches
    return max(
        b // every - schedule.seen(Job(s, b, d))
        for s in range(schedule.stages or schedule.workers)
        for b in range(schedule.microbatches)
        for d in (Direction.FORWARD, Direction.BACKWARD)
    )


def stable_share(late: int) -> float:
    """The largest stable rate of SGD whose gradients are so late, as a share of that
    without; of AdamW the same is taken."""
    now, then = stability("stale_sgd", 0).bound, stability("stale_sgd", late).bound
    assert now is not None and then is not None, "above 2 all are unstable"
    return then / now


class Batches:
    """What to train on and what to judge, the same on every rank, on a device."""

    def __init__(
        self, data: docstrings.Data, device: str, rows: int, seed: int
    ) -> None:
        self.data, self.device, self.rows = data, device, rows
        self.generator = torch.Generator().manual_seed(seed)
        train = spread(data.train_code), spread(data.train_doc)
        held_out = spread(data.held_out_code), spread(data.held_out_doc)
        self.judged = {
            "train": self._to_device(docstrings.pairs(*train, SEED)),
            "held-out": self._to_device(docstrings.pairs(*held_out, SEED)),
        }

    def __str__(self) -> str:
        return (
            f"{len(self.data.train_code):,} functions and their docstrings, "
            f"{len(self.data.held_out_code):,} more held out"
        )

    def draw(self) -> Batch:
        """The next batch to train on."""
        pairs = self.data.train_code, self.data.train_doc
        return self._to_device(docstrings.batch(*pairs, self.rows, self.generator))

    def _to_device(self, batch: Batch) -> Batch:
        code, doc, label = (tensor.to(self.device) for tensor in batch)
        return code, doc, label


def spread(rows: Tensor) -> Tensor:
    """JUDGED of the rows, evenly over all of them."""
    every = max(1, len(rows) // JUDGED)
    return rows[::every][:JUDGED]


def accuracies(step: Model, batches: Batches) -> str:
    """The accuracy on each set of pairs, as text."""
    shares = [
        f"{k} {accuracy(step, v, batches.rows):.3f}" for k, v in batches.judged.items()
    ]
    return f"{', '.join(shares)} (chance 0.500)"


@torch.no_grad()
def accuracy(step: Model, pairs: Batch, size: int) -> float:
    """The share of pairs that the model judges right, in batches of one size."""
    code, doc, label = pairs
    right = 0
    for first in range(0, len(label), size):
        rows = torch.arange(first, first + size, device=label.device) % len(label)
        hits = (step(code[rows], doc[rows]) > 0) == (label[rows] > 0.5)
        right += int(hits[: len(label) - first].sum())  # the rest wrapped around
    return right / len(label)
