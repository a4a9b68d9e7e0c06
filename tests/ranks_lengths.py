"""What each rank of tests/test_lengths.py does: python -m tests.ranks_lengths."""

from __future__ import annotations

import copy
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, schedules
from fxsched.models.gpt import GPT, GPTConfig


def train() -> None:
    """Five lengths, of which two plans are made, train as in eager PyTorch."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=32, width=16, layers=2))
    reference = copy.deepcopy(model)
    lengths = {"tokens": (1, 0), "targets": (1, -100)}
    schedule = schedules.one_f_one_b(2, 2)
    backend = fxsched.backend(schedule, lengths=lengths)
    run = torch.compile(model, backend=backend)
    own = torch.optim.SGD(model.parameters(), 0.1)
    other = torch.optim.SGD(reference.parameters(), 0.1)
    for length in (20, 17, 19, 22, 24):  # the first is one of a plan
        tokens = torch.randint(0, 32, (4, length))
        wanted, loss = reference(tokens, tokens.clone()), run(tokens, tokens.clone())
        torch.testing.assert_close(loss, wanted)
        for value, optimizer in ((wanted, other), (loss, own)):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    assert len(backend._steps) == 2
    state = fxsched.full_state_dict(model)
    torch.testing.assert_close(state, reference.state_dict())


class Sees(nn.Module):
    """A mean over all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens)).mean(1)


def refused() -> None:
    """Also where the rank has given weights up, at an earlier length."""
    torch._dynamo.reset()
    lengths = {"tokens": (1, 0)}
    backend = fxsched.backend(schedules.gpipe(2, 2), transport="gloo", lengths=lengths)
    run = torch.compile(Sees(), backend=backend)
    run(torch.randint(0, 32, (4, 20)))
    try:
        run(torch.randint(0, 32, (4, 19)))
    except PlanError as error:
        assert "output 0 depends on what is added" in str(error), error
    else:
        raise AssertionError("a mean over positions that were added")


if __name__ == "__main__":
    warnings.simplefilter("error", fxsched.LengthsWarning)
    dist.init_process_group("gloo")
    train()
    refused()
    dist.destroy_process_group()
