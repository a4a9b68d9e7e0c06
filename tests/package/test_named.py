"""torch.compile(model, backend="fxsched", options=..): options, errors, backends."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends import registry

import fxsched
from fxsched import PlanError, schedules

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
GROUP = "torch_dynamo_backends"
SCHEDULE = {"schedule": "1f1b", "workers": 2, "microbatches": 2}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The entry point as pyproject.toml has it, also where fxsched isn't installed."""
    points = tomllib.loads(PROJECT.read_text())["project"]["entry-points"][GROUP]
    registry.list_backends()  # which looks for those that are installed
    for name, value in points.items():
        point = EntryPoint(name, value, GROUP)
        monkeypatch.setitem(registry._BACKENDS, name, point)
    yield
    registry._COMPILER_FNS.pop("fxsched", None)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).tanh()).square().mean()


class Breaks(Net):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="fxsched", options=options)


def backend_of(call: Any) -> Any:
    """What Dynamo has behind a compiled module."""
    from fxsched.torch_compat.compiled_modules import innermost

    convert = call.dynamo_ctx.callback._torchdynamo_orig_backend
    return innermost(convert._torchdynamo_orig_backend)


def test_the_name_is_listed() -> None:
    assert "fxsched" in torch._dynamo.list_backends()


@pytest.mark.parametrize("kind", [Net, Breaks])
def test_a_model_by_name_trains_as_in_eager(kind: type[Net]) -> None:
    model, x = kind(), torch.randn(4, 4)
    wanted = torch.autograd.grad(model(x), list(model.parameters()))
    compiled(model, **SCHEDULE, carry="recompute")(x).backward()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_each_compile_has_a_backend_of_its_own() -> None:
    options, x = dict(SCHEDULE), torch.randn(4, 4)
    steps = [torch.compile(Net(), backend="fxsched", options=options) for _ in "ab"]
    for step in (*steps, *steps):
        step(x).backward()
    first, second = map(backend_of, steps)
    assert isinstance(first, fxsched.Backend) and isinstance(second, fxsched.Backend)
    assert first is not second and len(first._steps) == len(second._steps) == 1
    first.close()
    with pytest.raises(PlanError, match="this backend is closed"):
        steps[0](x)
    steps[1](x)


@pytest.mark.slow
def test_a_schedule_is_an_object_or_a_file_or_has_other_stages(tmp_path: Path) -> None:
    x, made = torch.randn(4, 4), schedules.gpipe(2, 2)
    made.save(tmp_path / "gpipe.json")
    several: list[Any] = [made, str(tmp_path / "gpipe.json"), tmp_path / "gpipe.json"]
    for schedule in several:
        step = compiled(Net(), schedule=schedule)
        step(x)
        assert backend_of(step).plan.schedule.workers == 2
    cases = {"looped_bfs": (4, 4), "ddp": (1, 1), "1f1b": (["two"], 2)}
    for name, (stages, count) in cases.items():
        step = compiled(Net(), **SCHEDULE | {"schedule": name, "stages": stages})
        step(x)
        assert len(backend_of(step).plan.stages) == count


def test_a_number_of_shards_is_the_schedule_s() -> None:
    one = {"schedule": "1f1b", "workers": 1, "microbatches": 2}
    model, x = Net(), torch.randn(4, 4)
    wanted = torch.autograd.grad(model(x), list(model.parameters()))
    step = compiled(model, **one, shards=2)
    step(x).backward()
    assert backend_of(step).plan.schedule.workers == 2
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, r"needs a schedule: options=\{\"schedule\": \"1f1b\", \"workers\": 4"),
    "name": ({"schedule": "1fb1"}, "there is no schedule '1fb1' .*did you mean 1f1b"),
    "type": ({"schedule": 3}, "give the name of a schedule, a Schedule, or a file"),
    "missing": (
        {"schedule": "gpipe", "workers": 2},
        "needs microbatches too; it takes",
    ),
    "unknown": (
        SCHEDULE | {"worker": 2},
        "'worker': ..} is not known .did you mean 'workers'..: 1f1b takes workers, ",
    ),
    "made": (
        SCHEDULE | {"schedule": schedules.gpipe(2, 2)},
        "'workers': ..} is not known: the Schedule gpipe takes nothing more",
    ),
    "stages": (
        SCHEDULE | {"schedule": "naive", "stages": 3},
        "naive makes 2 stages of these workers; leave it out",
    ),
    "shards": (SCHEDULE | {"shards": 0}, r"sharded\(shards=0\): give an int of 1 or "),
    "value": (SCHEDULE | {"carry": "all"}, r"carry='all'\): give 'auto', 'saved'"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_other_options_are_one_line_that_says_what_is_allowed(case: str) -> None:
    options, message = ERRORS[case]
    with pytest.raises(PlanError, match=message) as raised:
        compiled(Net(), **options)(torch.randn(4, 4))
    assert "\n" not in str(raised.value)


def test_modes_of_inductor_are_refused() -> None:
    call = torch.compile(Net(), backend="fxsched", mode="max-autotune")
    with pytest.raises(PlanError, match=r"mode='max-autotune'\): mode= is for Induc"):
        call(torch.randn(4, 4))
