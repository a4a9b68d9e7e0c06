"""Which tensor is which: parameters and buffers are known by themselves, however a
model reaches them, and names are for people."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import fxsched
from fxsched import Schedule, schedules
from tests.started_ranks import run_ranks

SCHEDULES = pytest.mark.parametrize(
    "schedule",
    [schedules.ddp(2, microbatches=4), schedules.one_f_one_b(2, microbatches=2)],
    ids=str,
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def held(value: Any, seen: set[int] | None = None) -> list[Tensor]:
    """All tensors that a model, list, dict or object holds, each once."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        inside: Sequence[Any] = list(value.values())
    elif isinstance(value, (list, tuple)):
        inside = value
    else:
        inside = list(getattr(value, "__dict__", {}).values())
    return [tensor for each in inside for tensor in held(each, seen)]


def assert_trains_as_eager(
    model: Any, schedule: Schedule, *inputs: Tensor, **options: Any
) -> fxsched.Plan:
    """Loss, gradients and buffers of two steps are eager's; the plan."""
    reference = copy.deepcopy(model)
    backend = fxsched.backend(schedule, **options)
    run = torch.compile(model, backend=backend)
    for _ in range(2):
        loss, wanted = run(*inputs), reference(*inputs)
        torch.testing.assert_close(loss, wanted)
        loss.backward()
        wanted.backward()
    for own, other in zip(held(model), held(reference), strict=True):
        torch.testing.assert_close(own, other)
        assert (own.grad is None) == (other.grad is None)
        if own.grad is not None:
            torch.testing.assert_close(own.grad, other.grad)
    assert backend.plan is not None
    return backend.plan


def names(plan: fxsched.Plan) -> set[str]:
    return {name for group in plan.groups for name in group.names}


class Block(nn.Module):
    """Sets an attribute of itself before its children run, as Swin's layers do."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.register_buffer("shift", torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        self.width = x.shape[1]
        return torch.tanh(self.linear(self.norm(x))) + self.shift / self.width


class Mixin(nn.Module):
    """Looks for attributes in a configuration, as diffusers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.config = {"scale": 0.5}

    def __getattr__(self, name: str) -> Any:
        if "config" in self.__dict__ and name in self.__dict__["config"]:
            return self.__dict__["config"][name]
        return super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale


class Holder:
    """An object that isn't a module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module


class Ways(nn.Module):
    """Reaches modules and tensors in every way but the usual one."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = [Block(), nn.Linear(4, 4)]
        self.tables = [torch.randn(4, requires_grad=True), torch.randn(4)]
        self.mapped = {
            "a": nn.Linear(4, 4),
            1: nn.Parameter(torch.randn(4)),
            "t": torch.randn(4),
        }
        self.pair = (nn.Linear(4, 4), Mixin())
        self.inner = nn.Linear(4, 4)
        self.holder = Holder(self.inner)
        self.weight = nn.Parameter(torch.randn(4))
        self.again = self.weight
        self.constant = torch.randn(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for module in (*self.listed, *self.pair, self.holder.module):
            x = module(x)
        x = self.mapped["a"](x) * self.mapped[1] + self.mapped["t"]
        x = self.inner(x) * self.weight + self.tables[0] * self.tables[1] * self.again
        return (x @ self.constant.T).pow(2).mean()


class Named(nn.Module):
    """A parameter named self, and one with the name of an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("self", nn.Parameter(torch.randn(4)))
        self.x = nn.Parameter(torch.randn(4))
        self.lambda_ = nn.Linear(4, 4)

    def forward(module, x: Tensor, table: Tensor) -> Tensor:
        scaled = x * module.self + module.x
        return module.lambda_(scaled * table[0]).pow(2).mean()


class Root(nn.Module):
    """Modules one after another, then the mean of squares."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


@SCHEDULES
def test_an_attribute_set_in_forward(schedule: Schedule) -> None:
    model = Root(Block(), Block())
    plan = assert_trains_as_eager(model, schedule, torch.randn(8, 4))
    assert names(plan) == set(model.state_dict())
    modules = [
        name for _, data in plan.stages.nodes(data=True) for name in data["modules"]
    ]
    assert {name.removesuffix(" (part)").rpartition(".")[0] for name in modules if name}


@pytest.mark.slow
@SCHEDULES
def test_a_module_below_the_root_with_its_own_getattr(schedule: Schedule) -> None:
    model = Root(Mixin(), Block(), Mixin())
    plan = assert_trains_as_eager(model, schedule, torch.randn(8, 4))
    assert names(plan) == set(model.state_dict())


@pytest.mark.slow
def test_stages_start_at_modules_that_are_reached_oddly() -> None:
    model, schedule = Root(Block(), Mixin()), schedules.gpipe(2, 2)
    x = torch.randn(8, 4)
    plan = fxsched.plan(model, schedule, x, stages=["blocks.1.second"])
    parts = ["blocks.0", "blocks.1.first", "blocks.1 (part)"]
    assert plan.stages.nodes[0]["modules"] == parts
    assert_trains_as_eager(model, schedule, x, stages=["blocks.0.linear"])


@pytest.mark.slow
@SCHEDULES
def test_lists_tuples_dicts_and_objects(schedule: Schedule) -> None:
    plan = assert_trains_as_eager(Ways(), schedule, torch.randn(8, 4))
    assert {
        "self.listed[0].norm.weight",
        "self.listed[1].weight",
        "self.mapped['a'].weight",
        "self.mapped[1]",
        "self.mapped['t']",
        "self.pair[1].second.bias",
        "self.tables[1]",
        "inner.weight",
        "weight",
    } <= names(plan)
    assert "again" not in names(plan)


@SCHEDULES
def test_names_like_self_and_arguments(schedule: Schedule) -> None:
    x, table = torch.randn(8, 4), torch.randn(1, 4)
    dims = {"table": None}
    plan = assert_trains_as_eager(Named(), schedule, x, table, batch_dims=dims)
    assert {"self", "x", "table"} <= names(plan)


def test_two_models_in_one_function() -> None:
    first, second, table = Root(Block()), Root(Mixin(), Block()), torch.randn(8, 4)
    x = torch.randn(8, 4)

    def both(x: Tensor) -> Tensor:
        return first(x) + second(x @ table.T @ table)

    backend = fxsched.backend(schedules.one_f_one_b(2, microbatches=2))
    torch.compile(both, backend=backend)(x).backward()
    assert backend.plan is not None
    assert {"first.blocks.0.shift", "second.blocks.1.shift", "table"} <= names(
        backend.plan
    )
    parameters = [*first.parameters(), *second.parameters()]
    own = [parameter.grad for parameter in parameters]
    wanted = torch.autograd.grad(both(x), parameters)
    torch.testing.assert_close(own, list(wanted))


def test_two_models_of_one_name() -> None:
    net, other = nn.Linear(4, 4), nn.Linear(4, 4)
    scope: dict[str, Any] = {"net": net}
    exec("def of(x): return net(x)", scope)
    of, x = scope["of"], torch.randn(8, 4)

    def both(net: nn.Module, x: Tensor) -> Tensor:
        return (net(x) * of(x)).pow(2).mean()

    backend = fxsched.backend(schedules.gpipe(2, 2))
    torch.compile(both, backend=backend)(other, x).backward()
    assert backend.plan is not None
    assert names(backend.plan) == {
        *("net.weight", "net.bias", "net.weight (2)", "net.bias (2)")
    }
    parameters = [*net.parameters(), *other.parameters()]
    wanted = torch.autograd.grad(both(other, x), parameters)
    torch.testing.assert_close([p.grad for p in parameters], list(wanted))


def test_a_parameter_that_is_tied_later() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.randn(8, 4)
    run = torch.compile(model, backend=fxsched.backend(schedules.gpipe(2, 2)))
    run(x).sum().backward()
    model[2].weight = model[0].weight
    model.zero_grad()
    run(x).pow(2).sum().backward()
    own = [parameter.grad for parameter in model.parameters()]
    wanted = torch.autograd.grad(model(x).pow(2).sum(), list(model.parameters()))
    torch.testing.assert_close(own, list(wanted))


class Job:
    """A method of an object that isn't a module, with a table of its own."""

    def __init__(self) -> None:
        self.model, self.table = Root(Block()), torch.randn(8, 4)

    def loss(self, x: Tensor) -> Tensor:
        return self.model(x @ self.table.T @ self.table)


def test_tables_of_a_methods_object_are_state() -> None:
    job, x = Job(), torch.randn(8, 4)
    backend = fxsched.backend(schedules.gpipe(2, 2))
    own = torch.compile(job.loss, backend=backend)(x)
    torch.testing.assert_close(own, job.loss(x))
    assert backend.plan is not None
    assert {"self.table", "blocks.0.shift"} <= names(backend.plan)


class Remembers(nn.Module):
    """Compares its input with an earlier one."""

    def __init__(self, earlier: Tensor, first: bool) -> None:
        super().__init__()
        self.earlier, self.first, self.linear = earlier, first, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        pair = (x, self.earlier) if self.first else (self.earlier, x)
        return self.linear(pair[0] @ pair[1].T @ pair[1]).pow(2).mean()


@pytest.mark.parametrize("first", [True, False])
def test_an_argument_that_the_model_holds_too(first: bool) -> None:
    x = torch.randn(8, 4)
    model = Remembers(x, first)
    run = torch.compile(model, backend=fxsched.backend(schedules.gpipe(2, 2)))
    said = r"the argument x and self\.earlier are the same .* pass x\.clone\(\)"
    with pytest.raises(fxsched.PlanError, match=said):
        run(x)


class Table(nn.Module):
    """A buffer that the caller may pass, or something else."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(8, 4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return (self.linear(x @ self.table.T @ self.table) * table.sum(0)).pow(2).mean()


def test_a_buffer_that_is_an_argument_is_state() -> None:
    model, x = Table(), torch.randn(8, 4)
    backend = fxsched.backend(schedules.gpipe(2, 2), loss_reduction="mean")
    run = torch.compile(model, backend=backend)
    torch.testing.assert_close(run(x, model.table), model(x, model.table))
    with pytest.warns(match="is not eager's"):  # it is cut now, and its sums differ
        run(x, torch.randn(8, 4))


class OfObject(nn.Module):
    """Gives the loss of a Swin for images and labels."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.SwinConfig(
            image_size=16,
            patch_size=2,
            num_channels=1,
            embed_dim=8,
            depths=[1, 1],
            num_heads=[2, 2],
            window_size=4,
            num_labels=3,
            drop_path_rate=0.0,
        )
        self.swin = transformers.SwinForImageClassification(config)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.swin(pixel_values=images, labels=labels).loss


@pytest.mark.slow
def test_swin() -> None:
    images, labels = torch.randn(4, 1, 16, 16), torch.randint(3, (4,))
    model = OfObject()
    assert_trains_as_eager(model, schedules.ddp(2, microbatches=2), images, labels)
    norms = [p for n, p in model.named_parameters() if "layernorm_before" in n]
    assert norms and all(p.grad is not None and p.grad.any() for p in norms)


# --------------------------------------------------------------- copies, no weights


def test_a_copy_of_a_compiled_model_trains_by_itself() -> None:
    model, x = Root(Block(), nn.Linear(4, 4)), torch.randn(8, 4)
    run = torch.compile(model, backend=fxsched.backend(schedules.gpipe(2, 2)))
    run(x).backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    again = copy.deepcopy(run)
    own = list(again.parameters())
    (2 * again(x)).backward()
    for old, parameter, copied in zip(before, model.parameters(), own, strict=True):
        assert torch.equal(parameter.grad, old)
        torch.testing.assert_close(copied.grad, 2 * old)


class Fixed(nn.Module):
    """Nothing to train."""

    def __init__(self, mean: bool) -> None:
        super().__init__()
        self.act, self.mean = nn.GELU(), mean

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(2 * x)
        return y.pow(2).mean() if self.mean else y


@pytest.mark.parametrize("mean", [True, False])
@SCHEDULES
def test_a_model_without_parameters(schedule: Schedule, mean: bool) -> None:
    model, x = Fixed(mean), torch.randn(8, 4)
    run = torch.compile(model, backend=fxsched.backend(schedule))
    torch.testing.assert_close(run(x), model(x))
    own, other = (x.clone().requires_grad_() for _ in range(2))
    run(own).sum().backward()
    model(other).sum().backward()
    torch.testing.assert_close(own.grad, other.grad)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))


# ------------------------------------------------------------------------- on ranks


@pytest.mark.slow
def test_ranks() -> None:
    done = run_ranks(2, "tests.ranks_identity")
    counts: dict[str, int] = {}
    for case, count in re.findall(r"^rank \d: (\w+): (\d+)$", done.stdout, re.M):
        counts[case] = counts.get(case, 0) + int(count)
    assert counts == {"ways": 3, "tied": 3, "two": 12}
    refusals = re.findall(r"rank (\d): copies: .* no values of blocks", done.stdout)
    assert sorted(refusals) == ["0", "1"]
    assert done.stdout.count("slices: 2 plans, 2 own") == 2  # one to evaluate
