"""What a rank of tests/inject_plans.py does with the trials of a round."""

from __future__ import annotations

import copy
import gc
import json
import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fxsched
from fxsched import PlanError
from fxsched.transport.processes import everyone
from tests import random_plans
from tests.faults import TIMEOUT, FailingSGD, Fuse, Trial
from tests.random_plans import Results, with_room

Say = Callable[..., None]
LEFT = 3 * TIMEOUT + 4  # seconds in which threads and descriptors must be gone
ROOM = (0, 4096, 12288)  # bytes that a full disk still has


class Training:
    """A trial's plan on this rank, beside eager PyTorch."""

    def __init__(self, trial: Trial) -> None:
        torch._dynamo.reset()
        dist.barrier()  # none waits for those that still plan another
        self.trial, self.case, self.fuse = trial, trial.case(), Fuse(trial)
        self.reference = copy.deepcopy(self.case.model)
        self.victim = dist.get_rank() == trial.victim
        self.updates = trial.fault == "optimizer"
        self.its_optimizer = torch.optim.SGD(self.reference.parameters(), lr=0.1)
        self.start()

    def start(self) -> None:
        """Makes its backend, for the schedule as it is now."""
        model, case = self.case.model, self.case
        options: dict[str, Any] = {"prefetch": case.prefetch, "passes": [self.fuse]}
        if self.updates:
            options["optimizer"] = FailingSGD(model.parameters(), lr=0.1)
        self.backend = fxsched.backend(
            *(case.schedule, case.stages, self.trial.transport, case.order, case.carry),
            timeout=TIMEOUT,
            **options,
        )
        self.run = torch.compile(model, backend=self.backend)

    def arm(self, armed: bool) -> None:
        """Whether the fault happens in the next call, on the victim alone."""
        self.fuse.armed = armed and self.victim
        FailingSGD.armed = armed and self.victim and self.updates

    def step(self) -> None:
        """A step that must be equal to eager's, unless it raises."""
        found = self._planned()
        if self.updates:
            return
        wanted = random_plans.run_eager(self.case._replace(model=self.reference))
        for one, other in zip(wanted.outputs, found.outputs, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
        for name, one in wanted.gradients.items():
            mine = found.gradients[name]
            if mine is not None:
                torch.testing.assert_close(mine, one, rtol=1e-5, atol=1e-6)

    def _planned(self) -> Results:
        case = self.case
        case.model.zero_grad()
        x, y = random_plans.batch(case)
        try:
            out = self.run(x, y)
        except PlanError as refusal:
            if "in_flight stops the schedule" not in str(refusal):
                raise
            self.backend.close()
            torch._dynamo.reset()
            self.case = with_room(case, refusal)
            self.start()
            out = self.run(x, y)
        if self.updates:
            self._update(out, y, x)
            return Results((out,), {})
        loss = out if isinstance(out, torch.Tensor) else random_plans.loss_of(out)
        if loss.requires_grad:
            loss.backward()
        outputs = (out,) if isinstance(out, torch.Tensor) else out
        return random_plans.collect(case.model, outputs, x)

    def _update(self, loss: torch.Tensor, y: torch.Tensor, x: torch.Tensor) -> None:
        """The update in plain PyTorch, and that the loss before it was the same."""
        self.its_optimizer.zero_grad()
        own = torch.stack(
            [
                self.reference(*part)
                for part in zip(
                    *(each.chunk(self.case.schedule.microbatches) for each in (x, y)),
                    strict=True,
                )
            ]
        ).mean()
        own.backward()
        self.its_optimizer.step()
        torch.testing.assert_close(loss.detach(), own.detach(), rtol=1e-5, atol=1e-6)

    def recover(self) -> None:
        """Brings the ranks together; weights that were being updated are loaded."""
        self.arm(False)
        dist.barrier()
        self.backend.reset(loaded=True)
        if self.updates:
            state = [self.reference.state_dict()]
            dist.broadcast_object_list(state, self.trial.victim)
            self.reference.load_state_dict(state[0])
            fxsched.load_full_state_dict(self.case.model, state[0])


def caught(work: Callable[[], object]) -> BaseException | None:
    """What some work raises, if anything."""
    try:
        work()
    except AssertionError:  # wrong values
        raise
    except Exception as error:
        return error
    return None


def survived(training: Training, say: Say) -> None:
    """A fault that ends no process; then the ranks go on."""
    if training.trial.fault != "pass":
        training.step()
    training.step() if training.trial.fault == "slow" else None
    training.arm(True)
    error = None
    for _ in range(3):
        error = error or caught(training.step)
    say("failed", error)
    training.recover()
    training.step()


def full_disk(training: Training, say: Say, folder: Path) -> None:
    """Saves on a disk that is full, and again with room."""
    training.step()
    model, backend = training.case.model, training.backend
    saves = folder / "saves"

    def save(number: int) -> Callable[[], object]:
        return lambda: fxsched.save(saves, model, None, backend, {"number": number})

    save(1)()
    if training.victim:
        room = shutil.disk_usage(folder).free - ROOM[training.trial.seed % len(ROOM)]
        (folder / "ballast").write_bytes(bytes(max(0, room)))
    dist.barrier()
    error = caught(save(2))
    say("full", error, os_error=isinstance(error, OSError) and error.errno)
    dist.barrier()
    number = fxsched.load(saves, model, None, backend)["number"]
    assert number == (2 if error is None else 1), (number, error)
    (folder / "ballast").unlink(missing_ok=True)
    dist.barrier()
    save(3)()
    assert fxsched.load(saves, model, None, backend) == {"number": 3}
    training.step()


def lost(training: Training, say: Say) -> None:
    """Steps until a rank is lost."""
    training.step()
    say("ready", None)
    while True:
        error = caught(training.step)
        if error is not None:
            say("failed", error, seconds=time.time())
            return


def threads() -> list[str]:
    """Those of fxsched's that are alive, and what each is in."""
    frames = sys._current_frames()
    return [
        f"{thread.name} in {frames[thread.ident].f_code.co_qualname}"
        for thread in threading.enumerate()
        if thread.name.startswith("fxsched") and thread.ident in frames
    ]


def descriptors() -> list[str]:
    """What open descriptors are of."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


def check_gone(what: Callable[[], list[str]], before: list[str]) -> None:
    """Raises AssertionError if there is more than before, and stays."""
    until = time.monotonic() + LEFT
    while len(what()) > len(before) and time.monotonic() < until:
        time.sleep(0.1)
        gc.collect()  # errors hold frames of threads that end a little later
    now = what()
    more = sorted((Counter(now) - Counter(before)).elements())
    assert len(now) <= len(before), f"{len(now)} stay, not {len(before)}: {more}"


def work(trials: Sequence[Trial], reports: int, folder: Path) -> None:
    """All trials of a round; what happens is written as lines of JSON."""
    rank, held = dist.get_rank(), []
    everyone("round").agree("round", None)  # ranks connect for such calls, once
    alive = threads()
    for trial in trials:

        def say(
            what: str, error: BaseException | None, trial: Trial = trial, **more: Any
        ) -> None:
            notes = getattr(error, "__notes__", [])
            text = error and "\n".join([f"{type(error).__name__}: {error}", *notes])
            line = {"seed": trial.seed, "rank": rank, "what": what, **more}
            said = json.dumps(line | {"error": text and text[:2000]})
            os.write(reports, f"{said}\n".encode())

        training = Training(trial)
        if trial.fault in ("kill", "stop", "cut"):
            lost(training, say)
        elif trial.fault == "disk":
            full_disk(training, say, folder)
        else:
            survived(training, say)
        training.backend.close()
        del training
        if trial.fault != "cut" or rank != trial.victim:  # which asks a store for ever
            check_gone(threads, alive)
        if trial is trials[0]:
            held = descriptors()
        elif trial.fault not in ("kill", "stop", "cut"):
            check_gone(descriptors, held)
        say("done", None)
