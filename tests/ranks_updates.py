"""What each rank of tests/schedules/test_zero.py does: python -m
tests.ranks_updates."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.testing import assert_close

import fxsched
from fxsched import Schedule, schedules
from tests.cases import MICROBATCHES
from tests.updates import TOLERANCE, adamw, batches, build_double, copied, eager
from tests.zero import even

SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "zero1": lambda: schedules.zero1(4),
    "zero2": lambda: schedules.zero2(4),
    "copies of zero1": lambda: copied(1),
    "copies of zero2": lambda: copied(2),
}
TRAINED = {  # in the program; tests.train_all has the others
    "zero1": "gpt",
    "zero2": "two_tower",
    "copies of zero1": "two_tower",
    "copies of zero2": "gpt",
}
Inputs = tuple[Tensor, ...]


def train(
    model: nn.Module, schedule: Schedule, inputs: Inputs, in_program: bool
) -> tuple[list[float], Optimizer]:
    """Losses of the calls, and the optimizer, of which each rank has a part."""
    optimizer = adamw(model)
    backend = fxsched.backend(schedule, optimizer=optimizer if in_program else None)
    step = torch.compile(model, backend=backend)
    losses = []
    for batch in batches(inputs):
        loss = step(*batch)
        if not in_program:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, optimizer


def compare(
    name: str, schedule: str, model: nn.Module, inputs: Inputs, in_program: bool
) -> Optimizer:
    """Trains, with losses and parameters equal to those of the plain loop."""
    made, model = SCHEDULES[schedule](), copy.deepcopy(model)
    wanted, reference = eager(model, adamw, inputs, MICROBATCHES)
    found, optimizer = train(model, made, inputs, in_program)
    assert_close(found, wanted, **TOLERANCE)
    state = fxsched.full_state_dict(model)
    if dist.get_rank() == 0:
        assert_close(dict(state), dict(reference.state_dict()), **TOLERANCE)
    where = "in the program" if in_program else "in the loop"
    print(
        f"rank {dist.get_rank()}: {name}, {schedule}, {where}: equal to the plain loop",
        flush=True,
    )
    return optimizer


def check_share(model: nn.Module, optimizer: Optimizer) -> None:
    """A rank's part of the optimizer's state is about a fourth of two moments."""
    held = sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim()
    )
    share = held / sum(2 * p.nbytes for p in model.parameters())
    assert abs(share - 0.25) <= 0.025, share
    print(f"rank {dist.get_rank()}: {share:.3f}, a fourth of the optimizer", flush=True)


def main() -> None:
    for schedule, name in TRAINED.items():
        compare(name, schedule, *build_double(name), in_program=True)
    compare("two_tower", "zero1", *build_double("two_tower"), in_program=False)
    compare("gpt", "copies of zero1", *build_double("gpt"), in_program=False)
    for schedule, in_program in (("zero1", True), ("zero2", False)):
        model, x = even()
        optimizer = compare("even", schedule, model, (x,), in_program)
        check_share(model, optimizer)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.barrier()
    dist.destroy_process_group()
