"""The demo: trains models/two_tower.py by a schedule.

Workers are threads, or ranks under `torchrun --nproc-per-node W -m fxsched demo`.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..draw.explanation import stage_shares
from ..draw.palette import clock
from ..draw.tables import first_rows
from ..equality.replay import replay
from ..jobs.job import PlanError
from ..jobs.schedule import Schedule
from ..jobs.user_values import counted
from ..models.two_tower import TwoTower
from ..params.full_state import full_state_dict
from ..params.released import is_given_up
from ..plans.plan import Plan
from ..progress import WIDTH, Progress
from ..transport import processes, world
from .demo_task import SEED, Task, accuracies, adamw, check, local_device
from .simulate_options import terminal_text

SHOWN = 12  # jobs of a worker's program, that --tables shows
LOSSES = 4  # at most, that are printed when the training is done


class LargestDifferences(NamedTuple):
    """The largest absolute differences from eager PyTorch.

    what: the tensors: gradients, or parameters after the updates of a call.
    """

    loss: float
    tensors: float
    what: str

    def __str__(self) -> str:
        return f"loss {self.loss:.1e}, {self.what} {self.tensors:.1e}"


def demo(
    schedule: Schedule,
    steps: int,
    device: str,
    learning_rate: float | None = None,
    seed: int = SEED,
    tables: bool = False,
) -> None:
    """Compares one step with eager, trains, and tells how well the model does.

    tables: whether to print the plan and a worker's program too.
    Raises PlanError for what cannot be planned.
    """
    began = time.perf_counter()
    check(schedule, device)
    device = local_device(device)
    say(f"{schedule}; reading Python's standard library ..")
    with Progress("reading the standard library"):
        task = Task(schedule, steps, device, learning_rate, seed)
    say(f"data: {task.batches}\n{task.rates}\n")
    eager = copy.deepcopy(task.model)  # a rank soon keeps only its own parameters
    if task.inside:
        before = accuracies(task.step, task.batches)
    difference = compare_call(task, eager) if task.inside else compare_step(task, eager)
    assert task.runner.plan is not None
    show(task.runner.plan, tables)
    if not task.inside:
        before = accuracies(task.step, task.batches)
    run_training(task)
    say(step_times(task, device))
    say(f"accuracy before training: {before}")
    say(f"accuracy after training: {accuracies(task.step, task.batches)}")
    plain = TwoTower(task.config).to(device)
    plain.load_state_dict(full_state_dict(task.model))  # as a file would hold it
    say(f"its state in plain PyTorch: {accuracies(plain, task.batches)}")
    say(f"largest difference from eager: {difference}")
    say(f"{time.perf_counter() - began:.0f} seconds; --tables shows the plan as well")
    processes.leave()


def show(plan: Plan, tables: bool) -> None:
    """Prints the stages and a picture of the step, and with tables all of the plan."""
    if not speaks():
        return
    if tables:
        say(f"{plan}\n\n{plan.table(0, jobs=SHOWN)}\n")
    else:
        shares = list(stage_shares(plan.timeline.jobs, plan.stages))
        say(first_rows("stage|modules|workers|work", shares, WIDTH))
    picture = plan.diagram()
    picture = replace(picture, title=f"as planned, {picture.title}")
    say(f"\n{terminal_text(picture)}\n")


def compare_step(task: Task, eager: nn.Module) -> LargestDifferences:
    """One step both ways from equal parameters, on the same microbatches."""
    batch, microbatches = task.batches.draw(), task.schedule.microbatches
    loss = task.step(*batch)
    loss.backward()
    expected = torch.zeros_like(loss)
    for part in zip(*(tensor.chunk(microbatches) for tensor in batch), strict=True):
        part_loss = eager(*part) / microbatches
        part_loss.backward()
        expected += part_loss.detach()
    pairs = zip(task.model.parameters(), eager.parameters(), strict=True)
    gradients = _largest([_distance(mine.grad, its.grad) for mine, its in pairs])
    task.model.zero_grad()
    return LargestDifferences(abs((loss - expected).item()), gradients, "gradients")


def compare_call(task: Task, eager: nn.Module) -> LargestDifferences | str:
    """The first call of training, and its replay: each job on the same versions of the
    weights, in plain PyTorch."""
    optimizer = adamw(eager, task.optimizer.param_groups[0]["lr"])
    batch = task.batches.draw()
    loss = task.train(batch)
    assert task.runner.plan is not None
    try:
        (expected,) = replay(task.runner.plan, eager, optimizer, [batch])
    except PlanError as error:
        return f"not known, {error}"
    pairs = zip(task.model.parameters(), eager.parameters(), strict=True)
    parameters = _largest(
        [
            _distance(None if is_given_up(mine) else mine.detach(), its.detach())
            for mine, its in pairs
        ]
    )
    return LargestDifferences(abs(loss - expected), parameters, "parameters")


def _distance(mine: Tensor | None, its: Tensor | None) -> float:
    """The largest; -1 where this rank has nothing."""
    assert its is not None, "eager has nothing here"
    return -1.0 if mine is None else float((mine - its).abs().max())


def _largest(distances: list[float]) -> float:
    """Of all parameters, each of which some rank has."""
    largest = world.largest(torch.tensor(distances).nan_to_num(torch.inf))
    assert largest.min() >= 0, "no worker has a parameter"
    return float(largest.max())


def run_training(task: Task) -> None:
    """An ordinary training loop, of the calls that are left."""
    every = -(-task.calls // (LOSSES - 1))
    losses: list[str] = []
    with Progress("training") as progress:
        while task.done < task.calls:
            loss = task.train(task.batches.draw())
            progress.at(f"loss {loss:.4f}, step {task.done} of {task.calls}")
            if task.done in (1, task.calls) or task.done % every == 0:
                step = f"step {task.done * task.updates}"
                losses.append(f"{loss:.6f} at {step if not losses else step[5:]}")
    say(f"loss: {', '.join(losses)}")


def step_times(task: Task, device: str) -> str:
    """The predicted step beside the measured ones, and why they differ."""
    plan, cores = task.runner.plan, len(os.sched_getaffinity(0))
    assert plan is not None
    predicted, measured = plan.simulate().latency, task.runner.metrics.seconds
    unit, number = ("core", cores) if device == "cpu" else ("GPU", 1)
    text = clock(max(predicted, measured), "s").text
    what = "step" if task.inside else "F and B"  # the loop steps the optimizer
    return (
        f"{what}: predicted {text(predicted)}, one {unit} per worker; "
        f"measured {text(measured)}, on {counted(number, unit)}"
    )


def speaks() -> bool:
    """Whether this process prints: of torchrun's ranks, the first."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Prints a line above the bar at once, on the process that speaks."""
    if speaks():
        tqdm.write(text)
        sys.stdout.flush()
