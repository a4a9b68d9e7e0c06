"""What each rank of tests/runtime/test_faults.py does: python -m tests.ranks_faults."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, schedules
from fxsched.transport import control


class Two(nn.Module):
    """Two layers, one a stage, with some function between them."""

    def __init__(self, between: Any = torch.tanh) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x))).pow(2).mean()


def compiled(model: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    options = {"stages": ["second"], **options}
    backend = fxsched.backend(schedules.gpipe(2, 2), **options)
    return torch.compile(model, backend=backend), backend


def batch(rows: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


def say(name: str, text: object) -> None:
    sys.stdout.write(f"rank {dist.get_rank()}: {name}: {text}\n")  # as one piece
    sys.stdout.flush()


def arithmetic() -> None:
    """Ranks that compute different things say which, and where."""
    odd = dist.get_rank() == 1
    different = {
        "relu": ({}, {"between": torch.relu}),
        "reduction": ({"loss_reduction": "sum"}, {}),
        "passes": ({"passes": [lambda program, request: program]}, {}),
    }
    for name, (options, model) in different.items():
        run, _ = compiled(Two(**(model if odd else {})), **(options if odd else {}))
        try:
            run(batch())
        except PlanError as error:
            say(name, error)


class Words(nn.Module):
    """Takes indices, of which some are out of range."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(ids))).pow(2).mean()


class Loop:
    """A model that is trained on ranks and, beside it, in plain PyTorch."""

    def __init__(self, transport: str, order: str = "static") -> None:
        self.name, self.rank = f"{transport} {order}", dist.get_rank()
        self.plain, self.model = Words(), Words()
        self.run, self.backend = compiled(
            self.model, stages=["head"], transport=transport, order=order, timeout=2
        )

    def ids(self, rows: int = 4, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(16, (rows, 3), generator=generator)

    def step(self, rows: int = 4, fork: bool = False) -> None:
        """A step that must be equal to eager's."""
        self.model.zero_grad()
        self.plain.zero_grad()
        loss = self.run(self.ids(rows))
        if fork:
            forked(loss)
        loss.backward()
        self.plain(self.ids(rows)).backward()
        torch.testing.assert_close(loss, self.plain(self.ids(rows)))
        pairs = zip(self.model.parameters(), self.plain.parameters(), strict=True)
        held = [(mine, other) for mine, other in pairs if mine.grad is not None]
        assert held
        for mine, other in held:
            torch.testing.assert_close(mine.grad, other.grad)

    def more(self) -> None:
        """Steps after which inputs are no longer compared as a whole."""
        self.step()
        self.step()

    def fails(self, case: str, call: Callable[[], Any]) -> None:
        """Says with what a call fails; after a reset all is well."""
        try:
            call()
        except (Exception, KeyboardInterrupt) as error:
            say(f"{self.name} {case}", f"{type(error).__name__}: {error}")
        dist.barrier()
        self.backend.reset()
        self.step()


def forked(loss: Tensor) -> None:
    """What a DataLoader's worker does between the call and backward()."""
    child = os.fork()
    if not child:
        del loss
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)


def departures(loop: Loop) -> None:
    """What only one rank does, and what the ranks say of it."""
    rank, run, ids = loop.rank, loop.run, loop.ids
    failures(loop)
    loop.fails("shape", lambda: run(ids(4 + 2 * rank)))

    def evaluate() -> None:
        with torch.no_grad():
            run(ids())

    loop.fails("evaluation", evaluate if rank == 0 else lambda: run(ids()))
    evaluate()
    loop.fails("evaluation again", evaluate if rank == 0 else lambda: run(ids()))
    loop.more()
    loop.fails("extra", (lambda: run(ids())) if rank == 1 else lambda: None)
    loop.more()
    loop.fails("skip", lambda: run(ids(seed=rank)))
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=rank == 1):
            run(ids(8))
    except PlanError as error:
        say(f"{loop.name} autocast", error)
    loop.step(8)  # planning apart needs no reset
    say(f"{loop.name} all", "equal to eager")


def failures(loop: Loop) -> None:
    """An exception on one rank, that both catch."""
    loop.step(fork=True)
    wrong = loop.ids().clone()
    wrong[3] = 99  # rank 0 looks it up
    loop.fails("exception", lambda: loop.run(wrong))
    with pytest.raises((IndexError, ConnectionError)):
        loop.run(wrong)
    refused(loop)
    loop.backend.reset()


def closing(loops: list[Loop]) -> None:
    """Rank 0 closes its backends, rank 1 calls one once more; nothing is left."""
    for loop in loops:
        loop.step()
    dist.barrier()
    if dist.get_rank() == 0:
        loops[0].backend.close()
    dist.barrier()
    if dist.get_rank() == 1:
        try:
            loops[0].run(loops[0].ids())
        except ConnectionError as error:
            say("closed", error)
    for loop in loops:
        loop.backend.close()
    others = [t for t in threading.enumerate() if t.name.startswith("fxsched")]
    for thread in others:
        thread.join(10)
    say("left", [thread for thread in others if thread.is_alive()])
    counts = []
    for _ in range(2):
        again = Loop("distributed", "static")
        again.step()
        again.backend.close()
        dist.barrier()
        torch._dynamo.reset()
        gc.collect()
        counts.append(
            [len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")]
        )
    say("more", counts[0] != counts[1] and counts)


def refused(loop: Loop) -> None:
    """After a failure, whatever the cause."""
    try:
        loop.run(loop.ids())
    except PlanError as error:
        say(f"{loop.name} refused", error)


def elsewhere() -> None:
    """One rank saves, the other calls the model, or saves for the first time too; then
    rank 1 ends its script."""
    rank = dist.get_rank()
    model = Two()
    run, backend = compiled(model, timeout=20)
    run(batch()).backward()
    with tempfile.TemporaryDirectory() as folder:
        calls: dict[str, tuple[Any, Any]] = {
            "save and call": (
                lambda: fxsched.save(folder, model),
                lambda: run(batch()),
            ),
            "save and state": (
                lambda: fxsched.save(folder, model),
                lambda: fxsched.full_state_dict(model),
            ),
        }
        for name, each in calls.items():
            try:
                each[rank]()
            except PlanError as error:
                say(name, error)
            dist.barrier()
            backend.reset(loaded=True)
        if rank == 1:
            return
        for name, call in {
            "ended save": lambda: fxsched.save(folder, model),
            "ended call": lambda: run(batch()),
        }.items():
            began = time.monotonic()
            try:
                call()
            except ConnectionError as error:
                say(name, f"{time.monotonic() - began < 15} {error}")


if __name__ == "__main__":
    control.LONG = 1.0
    dist.init_process_group("gloo")
    static, dynamic = (
        [Loop(transport, order) for transport in ("distributed", "gloo")]
        for order in ("static", "dynamic")
    )
    for loop in static:
        departures(loop)
    for loop in dynamic:
        failures(loop)
    closing([*static, *dynamic])
    arithmetic()
    elsewhere()
