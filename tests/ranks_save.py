"""What each rank of tests/checkpoint/test_save.py does: python -m tests.ranks_save
FOLDER."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, Schedule, schedules
from fxsched.transport.checksums import digest

STEPS = 5  # of a whole training, which is saved after the third
EPOCH = 4  # batches


class Dropping(nn.Module):
    """A few blocks with dropout, and a tied weight: frozen, for its gradient would be
    a sum of four, whose bits depend on the schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8).requires_grad_(False)
        self.blocks = nn.Sequential(*(self._block() for _ in range(3)))
        self.head = nn.Linear(8, 20)
        self.head.weight = self.embed.weight

    def _block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.blocks(self.embed(x).mean(1))
        return nn.functional.cross_entropy(self.head(h), y)


class Loader:
    """Shuffled batches, in another order in each epoch, from a generator of its own;
    its state is as torchdata's StatefulDataLoader has it."""

    def __init__(self) -> None:
        self.draw = torch.Generator().manual_seed(0)
        self.load_state_dict({"draw": self.draw.get_state(), "position": 0})

    def state_dict(self) -> dict[str, Any]:
        return {"draw": self.began, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.began, self.position = state["draw"], state["position"]
        self.draw.set_state(self.began)
        self.order = torch.randperm(EPOCH, generator=self.draw).tolist()

    def __next__(self) -> tuple[Tensor, Tensor]:
        if self.position == EPOCH:
            self.load_state_dict({"draw": self.draw.get_state(), "position": 0})
        draw = torch.Generator().manual_seed(self.order[self.position])
        self.position += 1
        x = torch.randint(20, (12, 5), generator=draw)
        return x, torch.randint(20, (12,), generator=draw)


class Training(NamedTuple):
    """A training run, and all of its state but the random generators'."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    backend: fxsched.Backend
    run: Any
    scheduler: torch.optim.lr_scheduler.LRScheduler
    loader: Loader

    @staticmethod
    def of(
        schedule: Schedule,
        seed: int,
        steps_itself: bool = False,
        building: AbstractContextManager[None] | None = None,
        **options: Any,
    ) -> Training:
        """steps_itself: whether the program steps the optimizer. building: where the
        model is built."""
        torch.manual_seed(seed)
        with building or nullcontext():
            model = Dropping()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if steps_itself:
            options["optimizer"] = optimizer
        backend = fxsched.backend(schedule, **options)
        run = torch.compile(model, backend=backend)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        return Training(model, optimizer, backend, run, scheduler, Loader())

    def steps(self, count: int) -> list[str]:
        """Losses, to the bit."""
        losses = []
        for _ in range(count):
            loss = self.run(*next(self.loader))
            if self.backend.options.optimizer is None:
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.scheduler.step()
            losses.append(loss.item().hex())
        return losses

    @property
    def extra(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "loader": self.loader}

    def save(self, folder: Path, **more: Any) -> Path:
        extra = self.extra | more
        return fxsched.save(folder, self.model, self.optimizer, self.backend, extra)

    def save_behind(self, folder: Path, **more: Any) -> fxsched.Saving:
        """In the background."""
        extra = self.extra | more
        return fxsched.save(
            *(folder, self.model, self.optimizer, self.backend, extra), background=True
        )

    def load(self, folder: Path) -> dict[str, Any]:
        return fxsched.load(
            folder, self.model, self.optimizer, self.backend, self.extra
        )

    def digest(self) -> int:
        """Of all that is trained."""
        moments = fxsched.full_optimizer_state_dict(self.model, self.optimizer)
        return digest([fxsched.full_state_dict(self.model), moments["state"]])


def resumed(folder: Path, schedule: Schedule, **options: Any) -> tuple[list[str], int]:
    """The last two steps of a training, loaded by another one before its first call."""
    building = fxsched.deferred(draws=False)
    training = Training.of(schedule, 7, building=building, **options)
    assert training.load(folder)["step"] == 3
    return training.steps(STEPS - 3), training.digest()


@contextmanager
def full_disk(name: str) -> Iterator[None]:
    """Where a function of fxsched.checkpoint, such as part.write_tensors, fails."""
    module, function = name.split(".")
    place: Any = import_module(f"fxsched.checkpoint.{module}")
    real = getattr(place, function)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    setattr(place, function, fail)
    try:
        yield
    finally:
        setattr(place, function, real)


def main(folder: Path, rank: int) -> None:
    training = Training.of(
        *(schedules.fsdp(2, 2), 0, False, fxsched.deferred()),
        stages=["blocks.1"],
        timeout=60,
    )
    torch.manual_seed(5 + rank)  # a step takes rank 0's
    training.steps(3)
    saving = training.save_behind(folder, step=3, mine=rank, seed=4)
    wanted = training.steps(STEPS - 3), training.digest()  # and is saved meanwhile
    assert {path.parent.name for path in saving.wait().glob("*/own.pt")} == {
        *("rank-0", "rank-1")
    }
    print(f"rank {rank}: {wanted}", flush=True)
    weights(folder / "weights", training)
    training.load(folder)  # after its first call, and back by two steps
    assert (training.steps(STEPS - 3), training.digest()) == wanted
    failing(folder, training, rank)
    if rank == 1:  # before this step has ended, and rank 0 gets anywhere
        os.kill(os.getpid(), signal.SIGKILL)
    training.steps(1)


def weights(folder: Path, training: Training) -> None:
    """Weights alone, to files of both ranks and back, also to a plain model."""
    fxsched.save_weights(folder, training.model, training.backend)
    index = (folder / "model.safetensors.index.json").read_text()
    assert "model-00001-of-00002" in index and "model-00002-of-00002" in index
    before = fxsched.full_state_dict(training.model)
    training.steps(1)
    fxsched.load_weights(folder, training.model, training.backend)
    fxsched.load_weights(folder, plain := Dropping())
    for model in (training.model, plain):
        assert digest(fxsched.full_state_dict(model)) == digest(before)


def failing(folder: Path, training: Training, rank: int) -> None:
    """Where one rank can't write, the checkpoint before stays the last."""
    try:
        with full_disk("part.write_tensors") if rank == 1 else nullcontext():
            training.save(folder, step=5)
    except (OSError, PlanError) as error:
        text = "rank 1 could not write its part: OSError: " if rank == 0 else ""
        assert f"{text}[Errno 28] No space left" in str(error), error
    else:
        raise AssertionError("no error")
    dist.barrier()
    assert sorted(path.name for path in folder.iterdir()) == [
        *("000001", "latest", "weights")
    ]
    refused(
        lambda: fxsched.save(folder, nn.Linear(2, 2) if rank else nn.ReLU()),
        "save: rank 1 saves another model, optimizer or extra= than rank 0; give",
    )
    apart = folder / f"own-{rank}"
    threads = fxsched.backend(schedules.gpipe(1, 1), transport="threads")
    fxsched.save(apart, nn.Linear(2, 2), None, threads, {"rank": rank})
    refused(
        lambda: fxsched.load(apart, nn.Linear(2, 2)),
        "load: ranks read different checkpoints in ",
    )


def refused(call: Callable[[], object], words: str) -> None:
    try:
        call()
    except PlanError as error:
        assert words in str(error) and "\n" not in str(error), error
    else:
        raise AssertionError(f"no error that says {words}")


if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        main(folder, rank)
    else:
        found = resumed(folder, schedules.one_f_one_b(2, 2))
        print(f"rank {rank}: {found}", flush=True)
    dist.destroy_process_group()
