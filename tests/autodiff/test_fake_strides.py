"""Fake tensors have the strides of real ones, which traces and sent gradients need."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import softplus

import fxsched
from fxsched import schedules
from fxsched.autodiff.fake_strides import CONTIGUOUS, POINTWISE, true_strides

aten = torch.ops.aten
G = torch.randn(3, 32, 8).mT  # a gradient that isn't contiguous
X, W = torch.randn(3, 8, 32), torch.randn(32)
S = torch.randn(3, 4)
CALLS: dict[Callable[..., object], tuple[object, ...]] = {
    aten._log_softmax_backward_data.default: (G, X, -1, torch.float32),
    aten.huber_loss_backward.default: (torch.tensor(1.0), G, X, 1, 1.0),
    aten.mse_loss_backward.default: (torch.tensor(1.0), G, X, 1),
    aten.smooth_l1_loss_backward.default: (torch.tensor(1.0), G, X, 1, 1.0),
    aten.native_layer_norm_backward.default: (
        *(G, X, [32], X.mean(2, keepdim=True), X.std(2, keepdim=True)),
        *(W, W, [True] * 3),
    ),
    aten.native_group_norm_backward.default: (
        *(X.contiguous().mT, G.mT.contiguous(), S, S, W),
        *(3, 32, 8, 4, [True] * 3),
    ),
    aten.elu_backward.default: (G, 1.0, 1.0, 1.0, False, X),
    aten.hardsigmoid_backward.default: (G, X),
    aten.hardswish_backward.default: (G, X),
    aten.hardtanh_backward.default: (G, X, 0.0, 6.0),
    aten.logit_backward.default: (G, X),
    aten.softplus_backward.default: (G, X, 1.0, 20.0),
}


def test_each_is_called() -> None:
    assert set(CALLS) == CONTIGUOUS | POINTWISE


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_fake_tensors_lie_as_real_ones(call: Callable[..., object]) -> None:
    def strides(found: object) -> list[tuple[int, ...]]:
        values = [found] if isinstance(found, Tensor) else found
        return [each.stride() for each in values if each is not None]

    mode = FakeTensorMode()
    args = [
        mode.from_tensor(each) if isinstance(each, Tensor) else each
        for each in CALLS[call]
    ]
    with mode, true_strides(mode):
        fake = strides(call(*args))
    assert fake == strides(call(*CALLS[call]))


class Tagger(nn.Module):
    """A 3-D Linear, an activation, and a convolution of the transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(16, 8), nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        for act in (F.elu, F.selu, F.celu, softplus, F.hardtanh, F.relu6):
            h = act(self.linear(F.pad(h, (0, 8))))
        h = F.hardswish(h) + F.hardsigmoid(h)
        return self.conv(h.transpose(1, 2)).square().mean()


def test_activations_before_a_transpose_are_trained() -> None:
    x = torch.randn(8, 12, 16)
    assert fxsched.verify(Tagger(), schedules.gpipe(1, 4), x).passed


class Parted(nn.Module):
    """Its B concatenates gradients of 4 dimensions, and views the result."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        b, t, _ = x.shape
        u, v = self.both(x).view(b, t, 2, 2).split(1, dim=3)
        u, v = u.reshape(b, t, 2).sigmoid(), softplus(v.reshape(b, t, 2))
        p = torch.cat([u, v.neg()], -1).mT
        p = p - p.mean(0)  # rows of the batch meet
        return (p.square().sum((1, 2)) - y).square().mean()


def test_a_view_of_a_concatenation_may_copy() -> None:
    inputs = torch.randn(8, 12, 8), torch.randn(8)
    assert fxsched.verify(Parted(), schedules.gpipe(2, 4), *inputs).passed
