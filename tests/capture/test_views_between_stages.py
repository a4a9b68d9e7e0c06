"""A stage may give back what it read: its gradient goes on all the same."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import schedules


class Cut(nn.Module):
    """contiguous() copies in the whole model, but not what another stage sent."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Sequential(nn.Tanh(), nn.Linear(4, 4))
        self.middle = Contiguous()

    def forward(self, x: Tensor) -> Tensor:
        turned = self.first(x).unflatten(1, (2, 2)).permute(0, 2, 1)
        return self.last(self.middle(turned)).pow(2).mean()


class Contiguous(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.contiguous().view(x.shape[0], -1)


class Turned(nn.Module):
    """Its loss's gradient has other strides than torch tells when it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        turned = self.last(self.first(x)).transpose(1, 2)
        return nn.functional.mse_loss(turned * 2, y)


def test_a_loss_of_turned_values() -> None:
    torch.manual_seed(0)
    model, x, y = Turned(), torch.randn(8, 3, 4), torch.randn(8, 4, 3)
    reference = copy.deepcopy(model)
    backend = fxsched.backend(
        schedules.gpipe(2, 4), stages=["last"], transport="threads"
    )
    torch.compile(model, backend=backend)(x, y).backward()
    reference(x, y).backward()
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.slow
def test_contiguous_alone_in_a_stage_hands_its_gradient_on() -> None:
    torch.manual_seed(0)
    model, x = Cut(), torch.randn(8, 4)
    reference = copy.deepcopy(model)
    backend = fxsched.backend(
        schedules.gpipe(3, 4), stages=["middle", "last.0"], transport="threads"
    )
    torch.compile(model, backend=backend)(x).backward()
    reference(x).backward()
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_a_stage_that_only_gives_another_shape_has_b_on_the_clock_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Linear(8, 3), Mean())
    schedule = fxsched.schedules.one_f_one_b(3, 4)
    plan = fxsched.plan(model, schedule, torch.randn(8, 2, 4), stages=["1", "2"])
    assert all(backward > 0 for _, backward in plan.stages.nodes(data="backward"))
    timeline = fxsched.simulate(plan.schedule, plan.stages).timeline
    assert len(timeline) == 3 * 4 * 2


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


class Rows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2) * 2


class ChannelsLast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)


@pytest.mark.slow
def test_values_of_another_order_of_memory_than_they_are_sent_in() -> None:
    torch.manual_seed(0)
    layers = ChannelsLast(), nn.Conv2d(3, 4, 1), Rows(), nn.Linear(4, 2), Mean()
    model, x = nn.Sequential(*layers), torch.randn(8, 3, 2, 2)
    reference = copy.deepcopy(model)
    backend = fxsched.backend(
        schedules.gpipe(3, 4), stages=["2", "3"], transport="threads"
    )
    torch.compile(model, backend=backend)(x).backward()
    reference(x).backward()
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


class Pixels(nn.Module):
    """contiguous() copies what another stage sent, but nothing in the whole model."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks = breaks
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.middle, self.last = Pixel(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.breaks:
            torch._dynamo.graph_break()  # so that torch.export traces it
        loss: Tensor = self.last(self.middle(self.first(x))).square().mean()
        return loss


class Pixel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1).contiguous().view(-1, x.shape[1])


@pytest.mark.parametrize("breaks", [False, True])
def test_pixels_in_channels_last_are_seen_as_rows(breaks: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 4, 4, 4).to(memory_format=torch.channels_last)
    model, schedule = Pixels(breaks), schedules.gpipe(2, 2)
    found = fxsched.verify(model, schedule, x, stages=["middle"])
    assert found.passed
