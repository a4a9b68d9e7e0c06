"""Clipping, saving and loading a model that ranks have between them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fxsched
from fxsched import PlanError, schedules
from fxsched.params import clip
from tests.ranks_state import Tied, batch, build, eager, planned
from tests.started_ranks import run_ranks


@pytest.mark.slow
def test_two_ranks_clip_save_and_resume_as_one_process() -> None:
    done = run_ranks(2, "tests.ranks_state")
    assert done.stdout.count("whole state") == 2, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_in_one_process_is_torchs(norm_type: float) -> None:
    model, _ = build()
    planned(model, schedules.gpipe(2, 4))(*batch(0))
    other = copy.deepcopy(model)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        its.grad = None if mine.grad is None else mine.grad.clone()
    wanted = nn.utils.clip_grad_norm_(other.parameters(), 0.1, norm_type)
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(fxsched.clip_grad_norm_(compiled, 0.1, norm_type), wanted)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert its.grad is None or torch.equal(mine.grad, its.grad)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
def test_norms_of_several_types_come_together_as_torchs_do(norm_type: float) -> None:
    types = torch.float32, torch.bfloat16, torch.float64, torch.float16
    kinds = torch.randint(4, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    gradients = [torch.randn(5).to(types[kind]) for kind in kinds]
    norms = [float(g) for g in torch._foreach_norm(gradients, norm_type)]
    ranks: list[clip.Norms] = [{}, {}, {}]
    for i, gradient in enumerate(gradients):
        ranks[i * i % 3].setdefault(gradient.dtype, {})[i, 0] = norms[i]
    wanted = nn.utils.get_total_norm(gradients, norm_type)
    found = nn.utils.get_total_norm(clip._joined(ranks, norm_type).values(), norm_type)
    assert torch.equal(found, wanted) and found.dtype is wanted.dtype


@pytest.mark.parametrize("norm_type", [0.0, 1.0, 2.0, float("inf")])
def test_norms_of_parts_are_the_norm_of_the_weight(norm_type: float) -> None:
    weight = torch.randn(6, 4).relu()
    norms = [float(torch.linalg.vector_norm(part, norm_type)) for part in weight]
    ranks: list[clip.Norms] = [
        {torch.float32: {(3, number): norm}} for number, norm in enumerate(norms)
    ]
    found = clip._joined(ranks, norm_type)
    wanted = torch.linalg.vector_norm(weight, norm_type)
    torch.testing.assert_close(found, {3: wanted})


def test_the_state_of_one_process_is_a_copy_with_plain_names() -> None:
    model, optimizer = build()
    wanted = copy.deepcopy(model.state_dict())
    outer = nn.ModuleDict({"inner": torch.compile(model, backend="eager")})
    state = fxsched.full_state_dict(torch.compile(outer, backend="eager"))
    eager(model)(*batch(0))
    optimizer.step()
    assert list(state) == [f"inner.{name}" for name in wanted]
    assert all(torch.equal(state[f"inner.{n}"], value) for n, value in wanted.items())
    assert state["inner.head.weight"] is state["inner.embed.weight"]  # tied, as there
    fxsched.load_full_state_dict(outer, state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, wanted[name]), name
    nn.ModuleDict({"inner": Tied()}).load_state_dict(state)


def test_the_optimizers_state_of_one_process_is_its_own() -> None:
    model, optimizer = build()
    eager(model)(*batch(0))
    optimizer.step()
    state = fxsched.full_optimizer_state_dict(model, optimizer)
    torch.testing.assert_close(state, optimizer.state_dict(), rtol=0, atol=0)
    again, its_own = build()
    fxsched.load_full_optimizer_state_dict(again, its_own, state)
    its_own.state[again.embed.weight]["step"] += 1  # changes no other's
    torch.testing.assert_close(state, optimizer.state_dict(), rtol=0, atol=0)


def test_what_is_no_model_has_no_state() -> None:
    model, optimizer = build()
    with pytest.raises(PlanError, match=r"no state of a function; give the model"):
        fxsched.full_state_dict(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="the optimizer has none of the model's"):
        fxsched.full_optimizer_state_dict(nn.Linear(2, 2), optimizer)
    with pytest.raises(RuntimeError, match="Missing key"):
        fxsched.load_full_state_dict(model, {})


def test_the_rule_for_inputs_is_one_that_there_is() -> None:
    schedule = schedules.gpipe(2, 4)
    with pytest.raises(PlanError, match="check_inputs='often'"):
        fxsched.backend(schedule, check_inputs="often")
    for wrong in (2, -1, True, "0"):
        with pytest.raises(PlanError, match=r"input_from=.*: give a rank, 0 to 1"):
            fxsched.backend(schedule, input_from=wrong)  # type: ignore[arg-type]
