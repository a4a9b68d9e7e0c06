"""The automatic split: balanced, and parallel branches in different stages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import schedules
from fxsched.models.gpt import GPT, GPTConfig


class Towers(nn.Module):
    """Branches of equal linear layers, called in turns, and a head."""

    def __init__(self, branches: int, layers: int) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
            for _ in range(branches)
        )
        self.head = nn.Linear(16 * branches, 16)

    def forward(self, *inputs: Tensor) -> Tensor:
        values = list(inputs)
        for depth in range(len(self.towers[0])):
            for i, tower in enumerate(self.towers):
                values[i] = torch.tanh(tower[depth](values[i]))
        return self.head(torch.cat(values, 1)).mean()


def towers_of(modules: list[str]) -> set[str]:
    return {name.split(".")[1] for name in modules if name.startswith("towers")}


@pytest.mark.parametrize("stages", [3, 4, 6])
def test_parallel_branches_are_in_different_stages(stages: int) -> None:
    inputs = [torch.ones(8, 16) for _ in range(3)]
    plan = fxsched.plan(Towers(3, 4), schedules.gpipe(stages, 4), *inputs)
    found = [towers_of(data["modules"]) for _, data in plan.stages.nodes(data=True)]
    assert all(len(towers) <= 1 for towers in found), found
    assert set.union(*found) == {"0", "1", "2"}


def test_values_go_straight_to_the_stage_that_reads_them() -> None:
    inputs = [torch.ones(8, 16) for _ in range(3)]
    plan = fxsched.plan(Towers(3, 1), schedules.gpipe(4, 4), *inputs)
    assert sorted(plan.stages.edges) == [(0, 3), (1, 3), (2, 3)]


def test_fewer_stages_than_branches_share_one() -> None:
    inputs = [torch.ones(8, 16) for _ in range(3)]
    plan = fxsched.plan(Towers(3, 4), schedules.gpipe(2, 4), *inputs)
    flops = [data["flops"] for _, data in plan.stages.nodes(data=True)]
    assert max(flops) <= 1.4 * min(flops)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_heaviest_stage_is_near_the_mean(stages: int) -> None:
    model = GPT(GPTConfig(width=32, layers=6))
    tokens = torch.ones(8, 16, dtype=torch.int64)
    plan = fxsched.plan(model, schedules.gpipe(stages, 4), tokens, tokens)
    flops = [data["flops"] for _, data in plan.stages.nodes(data=True)]
    assert max(flops) <= 1.1 * sum(flops) / stages
