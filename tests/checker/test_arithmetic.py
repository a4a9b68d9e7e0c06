"""Plans tell apart what models compute, and are alike in any process."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxsched
from fxsched import schedules
from fxsched.ir.graph_text import LOCAL, argument_text
from fxsched.plans.arithmetic import first_difference

Function = Callable[[Tensor], Tensor]


class Model(nn.Module):
    """Two layers, with whatever is between them."""

    def __init__(
        self,
        between: Function = torch.relu,
        dropout: float = 0.1,
        eps: float = 1e-5,
        constant: float = 2.0,
    ) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)
        self.between, self.constant = between, constant
        self.norm, self.dropout = nn.LayerNorm(8, eps), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.between(self.norm(self.first(x))))
        x = x + torch.tensor([1.0, self.constant]).repeat(4)
        return self.second(x).pow(2).mean()


def halve(program: fx.GraphModule, request: object) -> fx.GraphModule:
    return program


def plan(model: nn.Module, **options: Any) -> fxsched.Plan:
    torch._dynamo.reset()
    casts = options.pop("casts", False)
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        schedule = schedules.gpipe(2, 2)
        return fxsched.plan(model, schedule, torch.ones(4, 8), **options)


@functools.cache
def plain() -> fxsched.Plan:
    return plan(Model())


OTHERS: dict[str, Callable[[], fxsched.Plan]] = {
    "relu for gelu": lambda: plan(Model(torch.nn.functional.gelu)),
    "dropout": lambda: plan(Model(dropout=0.2)),
    "eps": lambda: plan(Model(eps=1e-6)),
    "a constant": lambda: plan(Model(constant=3.0)),
    "a scale": lambda: plan(Model(lambda x: torch.relu(x) * 1.0001)),
    "autocast": lambda: plan(Model(), casts=True),
    "carry": lambda: plan(Model(), carry="recompute"),
    "evaluation": lambda: plan(Model().eval()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_the_digest_covers(name: str) -> None:
    other = OTHERS[name]()
    assert other.digest != plain().digest
    mine, its = first_difference(plain().arithmetic, other.arithmetic)
    assert mine != its


def test_a_difference_names_both_and_the_users_line() -> None:
    other = OTHERS["relu for gelu"]()
    mine, its = first_difference(plain().arithmetic, other.arithmetic)
    assert "relu(%" in mine and "gelu(%" in its
    assert "test_arithmetic.py:" in mine and "self.between(" in mine
    mine, its = first_difference(plain().arithmetic, OTHERS["carry"]().arithmetic)
    assert (mine, its) == ("carry='saved'", "carry='recompute'")


class Halve:
    """A pass that is an object, somewhere else in each process."""

    def __call__(self, program: fx.GraphModule, request: object) -> fx.GraphModule:
        return program


@pytest.mark.slow
def test_a_pass_that_is_an_object_is_known_by_its_class() -> None:
    one, other = (plan(Model(), passes=[Halve()]).arithmetic.passes for _ in range(2))
    assert one == other != plan(Model(), passes=[halve]).arithmetic.passes


def test_equal_models_have_equal_digests() -> None:
    assert plan(Model()).digest == plain().digest


@pytest.mark.slow
def test_another_process_with_other_hashes_has_the_same_digest() -> None:
    script = "from tests.checker.test_arithmetic import plain; print(plain().digest)"
    found = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == plain().digest


@pytest.mark.parametrize(
    "make", [torch.device, str, "at {}".format, lambda name: [f"{name}"]]
)
def test_ranks_on_devices_of_their_own_compute_the_same(
    make: Callable[[str], Any],
) -> None:
    one, other = (
        LOCAL.sub("", argument_text({"device": make(f"cuda:{i}")}, {})) for i in (0, 1)
    )
    assert one == other and "cuda" in one
    kept = "device(type='cuda'), narrow(%1, 0, index=3), {'a': 1}"
    assert LOCAL.sub("", kept) == kept
