"""torch.utils.checkpoint in a model: less is held, and B computes it again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxsched
from fxsched import Schedule, schedules


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(8), dropout
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.dropout)


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0, again: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(4))
        self.head, self.again, self.reentrant = nn.Linear(8, 1), again, False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.again:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            else:
                x = block(x)
        return self.head(x).pow(2).mean()


def stepped(
    model: nn.Module, schedule: Schedule, **options: Any
) -> tuple[list[Tensor], int]:
    """The loss and the gradients of a step, and the bytes held of a microbatch."""
    torch.manual_seed(3)
    backend = fxsched.backend(schedule, **options)
    loss = torch.compile(model, backend=backend)(
        torch.linspace(-1, 1, 96).view(4, 3, 8)
    )
    loss.backward()
    assert backend.plan is not None
    held = sum(data["held"] for _, data in backend.plan.stages.nodes(data=True))
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients], held


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dropout", "schedule"),
    [(0.0, schedules.zb_h1(2, 2)), (0.5, schedules.one_f_one_b(2, 2))],
    ids=str,
)
def test_what_is_marked_is_not_held(dropout: float, schedule: Schedule) -> None:
    torch.manual_seed(0)
    model = Net(dropout)
    marked = copy.deepcopy(model)
    marked.again = True
    wanted, all_held = stepped(model, schedule)
    found, held = stepped(marked, schedule)
    torch.testing.assert_close(found, wanted)
    assert len(found) == 1 + len(list(model.parameters()))
    if not schedule.split_backward:  # W takes what B computed again
        assert held < 0.5 * all_held


@pytest.mark.slow
def test_marked_models_equal_eager() -> None:
    torch.manual_seed(0)
    model = Net(again=True)
    model.reentrant = True
    plain = copy.deepcopy(model)
    plain.again = False
    found, _ = stepped(model, schedules.gpipe(2, 2), carry="recompute")
    losses = [plain(x) / 2 for x in torch.linspace(-1, 1, 96).view(4, 3, 8).chunk(2)]
    sum(losses).backward()  # type: ignore[union-attr]
    gradients = [p.grad for p in plain.parameters()]
    torch.testing.assert_close(found, [sum(losses).detach(), *gradients])  # type: ignore


@pytest.mark.slow
def test_stages_that_differ_in_marks_alone_are_told_apart() -> None:
    class Half(Net):
        def forward(self, x: Tensor) -> Tensor:
            for i, block in enumerate(self.blocks):
                x = checkpoint(block, x, use_reentrant=False) if i % 2 else block(x)
            return self.head(x).pow(2).mean()

    torch.manual_seed(0)
    model = Half()
    plain = Net()
    plain.load_state_dict(model.state_dict())
    stages = [f"blocks.{i}" for i in range(1, 4)]
    schedule = schedules.interleaved(2, 2, 4)
    wanted, _ = stepped(plain, schedule, stages=stages)
    backend = fxsched.plan(model, schedule, torch.ones(4, 3, 8), stages=stages)
    held = [data["held"] for _, data in sorted(backend.stages.nodes(data=True))]
    assert held[1] < 0.5 * held[0] and held[1] < 0.5 * held[2]
    found, _ = stepped(model, schedule, stages=stages)
    torch.testing.assert_close(found, wanted)
