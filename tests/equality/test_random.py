"""Random numbers of a step follow torch's generator, as the user's own do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import schedules
from tests.runtime.test_training_loop import Chain, batch, compiled


@pytest.fixture
def run() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Chain(dropout=0.5)
    backend = fxsched.backend(schedules.one_f_one_b(2, 4))
    return torch.compile(model, backend=backend), batch()


def losses(run: nn.Module, inputs: tuple[Tensor, Tensor], steps: int) -> list[float]:
    return [float(run(*inputs)) for _ in range(steps)]


@pytest.mark.slow
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


@pytest.mark.slow
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


class Turned(nn.Module):
    """Dropout of a value whose memory is in another order than its dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.first(x).transpose(1, 2), 0.4)
        return self.last(x.transpose(1, 2)).square().mean()


@pytest.mark.slow
def test_dropout_is_the_same_wherever_the_model_is_cut() -> None:
    torch.manual_seed(0)
    model, x = Turned(), torch.randn(4, 6, 8)
    results = []
    for stages in (1, 4):
        model.zero_grad()
        torch.manual_seed(3)
        backend = fxsched.backend(schedules.gpipe(stages, 2))
        loss = torch.compile(model, backend=backend)(x)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*results)
