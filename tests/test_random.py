"""Random numbers of a step follow torch's generator, as the user's own do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import schedules
from tests.test_training_loop import Chain, batch, compiled


@pytest.fixture
def run() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Chain(dropout=0.5)
    backend = fxsched.backend(schedules.one_f_one_b(2, 4))
    return torch.compile(model, backend=backend), batch()


def losses(run: nn.Module, inputs: tuple[Tensor, Tensor], steps: int) -> list[float]:
    return [float(run(*inputs)) for _ in range(steps)]


def test_the_same_seed_and_the_same_state_repeat_dropout(run) -> None:
    step, inputs = run
    torch.manual_seed(3)
    first = losses(step, inputs, 3)
    assert len(set(first)) == 3
    torch.manual_seed(3)
    assert losses(step, inputs, 2) == first[:2]
    state = torch.random.get_rng_state()
    assert losses(step, inputs, 1) == first[2:]
    torch.random.set_rng_state(state)  # as after loading a checkpoint
    assert losses(step, inputs, 1) == first[2:]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        assert losses(step, inputs, 1) == first[:1]
    torch.random.set_rng_state(state)
    torch.rand(1)
    assert losses(step, inputs, 1) != first[2:]


def test_a_step_takes_one_number_and_none_without_dropout(run) -> None:
    step, inputs = run
    torch.manual_seed(9)
    torch.randint(2**63 - 1, ())
    wanted = torch.rand(3)
    torch.manual_seed(9)
    step(*inputs)
    assert torch.equal(torch.rand(3), wanted)
    plain = compiled(Chain())
    torch.manual_seed(9)
    wanted = torch.rand(3)
    torch.manual_seed(9)
    plain(*inputs)
    assert torch.equal(torch.rand(3), wanted)
