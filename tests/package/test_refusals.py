"""What cannot be planned is one error with its line, and leaves nothing behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxsched import PlanError
from fxsched.ir.modes import modes_after_errors

from ..refusals import (
    CASES,
    PAGE,
    Of,
    by_row,
    chosen,
    distinct,
    drawn,
    embedded,
    generated,
    gradient,
    mapped,
    normed,
    page,
    seeded,
    sparse,
    stepped,
    tangent,
)

HERE = r"refusals\.py(\", line |:)\d+, in "


def masked(m: Any, x: Tensor) -> Tensor:
    return m.two(m.one(x)).masked_fill(~m.mask, 0.0).pow(2).mean()


def scanned(m: Any, x: Tensor) -> Tensor:
    """A selective scan as in Mamba, step by step."""
    state = torch.zeros_like(x[:, 0])
    found = []
    for t in range(x.shape[1]):
        step = torch.sigmoid(m.one(x[:, t]))
        state = torch.exp(-step) * state + step * m.two(x[:, t])
        found.append(state)
    return torch.stack(found, 1).pow(2).mean()


def eager(model: nn.Module, x: Tensor) -> Any:
    """The same by plain PyTorch, the microbatches one after the other."""
    total = torch.zeros(())
    for part in x.chunk(2):
        loss = model(part) / 2
        loss.backward()
        total += loss.detach()
    return [total, *(p.grad for p in model.parameters())]


def assert_ordinary() -> None:
    """An ordinary model trains equal to eager, and so does a plain checkpoint."""
    torch.manual_seed(0)
    for then in (masked, scanned):
        model = Of(then)
        x = torch.randn(4, 3, 4) if then is scanned else torch.randn(4, 4)
        torch.testing.assert_close(stepped(copy.deepcopy(model), x), eager(model, x))
    layer = nn.Linear(4, 4)
    checkpoint(layer, torch.randn(2, 4), use_reentrant=False).sum().backward()
    assert layer.weight.grad is not None
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


MESSAGES = {
    gradient: r"torch.func.grad, vjp, jacrev or hessian at\n.*" + HERE + "gradient",
    tangent: r"torch.func.jvp or jacfwd at\n.*" + HERE + "tangent",
    mapped: r"torch.vmap at\n.*" + HERE + r"mapped[\s\S]*out of the compiled",
    chosen: r"torch.cond at\n.*" + HERE + r"chosen[\s\S]*write torch.where",
    normed: r"a buffer is written inside torch.utils.checkpoint at\n.*" + HERE,
    sparse: r"stops at\n.*" + HERE + r"sparse[\s\S]*sparse Tensor",
    drawn: r"draws numbers with random[\s\S]*graph at refusals.py:\d+, return m.one",
    seeded: r"calls torch.manual_seed[\s\S]*graph at refusals.py:\d+, torch.manual_s",
    generated: r"draws from a torch.Generator at[\s\S]*graph at refusals.py:\d+, noise",
    by_row: r"row by row[\s\S]*refusals.py:\d+ in by_row",
    embedded: r"an embedding has sparse=True at[\s\S]*use sparse=False",
}


@pytest.mark.parametrize("then", CASES)
def test_a_refusal_says_where_and_leaves_nothing(
    then: Callable[[Any, Tensor], Tensor],
) -> None:
    message = MESSAGES.get(then, HERE + then.__name__)
    with pytest.raises(PlanError, match=message):
        stepped(Of(then), torch.linspace(-1.0, 1.0, 16).view(4, 4))
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    checkpoint(model, torch.ones(2, 4), use_reentrant=False).sum().backward()
    if then in (gradient, distinct):
        assert_ordinary()


def test_modes_after_an_error() -> None:
    cast: Any = torch.amp.autocast_mode
    with pytest.raises(KeyError), modes_after_errors():
        cast._enter_autocast("cpu", torch.bfloat16, True, True)
        torch.set_grad_enabled(False)
        raise KeyError
    assert_ordinary()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.autocast_increment_nesting() == 2  # not one of before
        torch.autocast_decrement_nesting()


def test_what_is_for_inductor_is_refused() -> None:
    for options in ({"mode": "reduce-overhead"}, {"options": {"max_autotune": True}}):
        with pytest.raises(
            PlanError, match=r"is for Inductor; leave it out, or take fx"
        ):
            stepped(Of(masked), torch.ones(4, 4), **options)
    assert_ordinary()


@pytest.mark.slow
def test_the_page_of_refusals_is_what_models_raise() -> None:
    assert PAGE.read_text() == page(), "python -m tests.refusals writes it"
