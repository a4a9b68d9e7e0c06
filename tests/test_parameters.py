"""Hooks on parameters, penalties and norms by hand, on threads and ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, schedules
from tests.ranks_parameters import batch, build
from tests.started_ranks import run_ranks


def test_two_ranks_change_parameters_as_one_process() -> None:
    done = run_ranks(2, "tests.ranks_parameters")
    assert done.stdout.count("parameters hold") == 2, done.stdout


@pytest.mark.parametrize("name", ["one_f_one_b", "fsdp"])
def test_hooks_run_once_with_the_gradient_of_the_whole_batch(name: str) -> None:
    torch._dynamo.reset()
    whole, model, called = build(), build(), []
    whole(batch()).square().mean().backward()
    weight = model.get_parameter("2.weight")
    weight.register_hook(called.append)
    weight.register_post_accumulate_grad_hook(lambda p: called.append(p.grad))
    with fxsched.backend(getattr(schedules, name)(2, 2), stages=["2"]) as backend:
        torch.compile(model, backend=backend)(batch()).square().mean().backward()
    assert len(called) == 2
    for gradient in called:
        torch.testing.assert_close(gradient, whole.get_parameter("2.weight").grad)
        assert type(gradient) is Tensor


def test_a_hook_that_no_backward_would_run_is_refused() -> None:
    class Loss(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x).square().mean()

    model = Loss(6, 4)
    model.weight.register_hook(torch.neg)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with fxsched.backend(schedules.gpipe(2, 2), optimizer=sgd) as backend:
        run = torch.compile(model, backend=backend)
        with pytest.raises(PlanError, match=r"weight has a hook on its gradient"):
            run(batch())


def test_a_sum_over_parameters_of_one_process_is_pythons() -> None:
    model = build()
    found = fxsched.parameter_sum(model, lambda name, p: p.square().sum())
    found.backward()
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.grad, 2 * parameter.detach())
