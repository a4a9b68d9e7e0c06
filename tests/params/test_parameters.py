"""Hooks on parameters, penalties and norms by hand, on threads and ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, schedules
from fxsched.ir.parts import Cut, KeptParts
from fxsched.params.cut_weights import cut_weight
from fxsched.params.record import RECORDS, note, record_of
from tests.ranks_parameters import batch, build
from tests.started_ranks import run_ranks


@pytest.mark.slow
def test_two_ranks_change_parameters_as_one_process() -> None:
    done = run_ranks(2, "tests.ranks_parameters")
    assert done.stdout.count("parameters hold") == 2, done.stdout


@pytest.mark.slow
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


def test_a_record_ends_with_its_tensor() -> None:
    tensor, other, count = torch.ones(2), torch.ones(2), len(RECORDS)
    note(tensor, name="a")
    note(tensor, workers=2)
    note(other, name="b")
    assert len(RECORDS) == count + 2
    assert (record_of(tensor).name, record_of(tensor).workers) == ("a", 2)
    assert {r.name for t, r in RECORDS.items() if t is tensor or t is other} == {*"ab"}
    del tensor
    assert len(RECORDS) == count + 1
    assert record_of(torch.ones(2)).name == ""  # even if it has the id of the first


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


def test_a_weight_in_parts_is_filled_and_else_refused() -> None:
    model = nn.Linear(4, 4, bias=False)
    place = KeptParts(Cut(0, 1, 2), ((0,), (1,)), (None, None))
    cut_weight("weight", model.weight, place, 0, 2, 0)
    torch.manual_seed(0)
    wanted = torch.empty(4, 4).uniform_(-1, 1)
    torch.manual_seed(0)
    nn.init.uniform_(model.weight, -1, 1)
    with fxsched.local_parts(model):
        assert torch.equal(model.weight.data, wanted[:2])
    with pytest.raises(PlanError, match=r"weight\.mul_: ranks have weight in parts, o"):
        model.weight.mul_(2)
    with pytest.raises(PlanError, match=r"leave the weight whole by shards={names: .."):
        model.weight.register_hook(torch.neg)
    with pytest.raises(
        PlanError, match="parameter_sum has no term of weight, which ra"
    ):
        fxsched.parameter_sum(model, lambda name, p: p.sum())
    hooked = nn.Parameter(torch.ones(4, 4))
    hooked.register_hook(torch.neg)
    with pytest.raises(PlanError, match="has a hook on its gradient, which ranks have"):
        cut_weight("weight", hooked, place, 0, 2, 0)
