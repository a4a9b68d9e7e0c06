"""What an ordinary training loop may do with a compiled model."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import Placement, Schedule, schedules
from fxsched.ir.modes import casts, modes_after_errors, with_casts
from tests.devices import find_devices

ORDERS = pytest.mark.parametrize("order", ["static", "dynamic"])


class Chain(nn.Module):
    """Linear layers and tanh; the loss, or what comes out."""

    def __init__(self, layers: int = 4, frozen: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        for layer in self.layers[:frozen]:
            layer.requires_grad_(False)
        self.dropout = dropout

    def hidden(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x = nn.functional.dropout(x, self.dropout, self.training)
        return x

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.hidden(x) - y).pow(2).mean()


def batch(size: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 8), torch.randn(size, 8)


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def eager(model: nn.Module, *inputs: Tensor, parts: int = 4) -> Tensor:
    """Trains a model on microbatches the plain way, one after the other."""
    total = torch.zeros(())
    for part in zip(*(x.chunk(parts) for x in inputs), strict=True):
        loss = model(*part) / parts
        loss.backward()
        total = total + loss.detach()
    return total


def assert_like(model: nn.Module, reference: nn.Module) -> None:
    torch.testing.assert_close(gradients(model), gradients(reference))
    torch.testing.assert_close(list(model.buffers()), list(reference.buffers()))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def compiled(model, schedule: Schedule | None = None, **options):
    way = schedule or schedules.one_f_one_b(4, 4)
    return torch.compile(model, backend=fxsched.backend(way, **options))


def test_two_accumulated_steps_give_twice_the_gradient() -> None:
    model, inputs = Chain(), batch()
    run = compiled(model)
    run(*inputs).backward()
    once = gradients(model)
    run(*inputs).backward()
    for first, both in zip(once, gradients(model), strict=True):
        assert torch.equal(both, first * 2)


def test_the_incoming_gradient_multiplies() -> None:
    model, inputs = Chain(), batch()
    run = compiled(model)
    run(*inputs).backward()
    once = gradients(model)
    model.zero_grad()
    (run(*inputs) * 3).backward()
    torch.testing.assert_close(gradients(model), [g * 3 for g in once])


@pytest.mark.slow
def test_without_gradients_only_forward_runs_and_grad_stays() -> None:
    model, inputs = Chain(), batch()
    run = compiled(model)
    run(*inputs).backward()
    before = gradients(model)
    model.eval()
    with torch.no_grad():
        loss = run(*inputs)
    torch.testing.assert_close(loss, model(*inputs).detach())
    assert not loss.requires_grad
    torch.testing.assert_close(gradients(model), before)


def test_loss_without_backward_leaves_grad_alone() -> None:
    model = Chain()
    compiled(model)(*batch())
    assert gradients(model) == [None] * 8


def test_sum_instead_of_mean() -> None:
    model, inputs = Chain(), batch()
    reference = copy.deepcopy(model)
    loss = compiled(model, loss_reduction="sum")(*inputs)
    loss.backward()
    total = eager(reference, *inputs)
    torch.testing.assert_close(loss.detach(), total * 4)
    wanted = [g * 4 for g in gradients(reference)]
    torch.testing.assert_close(gradients(model), wanted)


@ORDERS
def test_gradients_of_inputs_come_back(order: str) -> None:
    model, (x, y) = Chain(), batch()
    reference, z = copy.deepcopy(model), x.clone().requires_grad_()
    x.requires_grad_()
    compiled(model, schedules.lpp(4, 2, 4), order=order)(x, y).backward()
    eager(reference, z, y)
    torch.testing.assert_close(x.grad, z.grad)


class TwoReaders(nn.Module):
    """An input read by two branches and again at the end; a table for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(16, 8)

    def forward(self, batch: dict[str, Tensor], table: Tensor) -> dict[str, Tensor]:
        x = batch["x"]
        left, right = torch.tanh(self.left(x)), torch.tanh(self.right(x))
        out = self.head(torch.cat([left, right], 1)) + x @ table
        return {"loss": (out - batch["y"]).pow(2).mean(), "out": out}


def test_nested_inputs_and_one_that_all_rows_share() -> None:
    model, (x, y) = TwoReaders(), batch()
    table = torch.randn(8, 8, requires_grad=True)
    reference, other = copy.deepcopy(model), table.detach().clone().requires_grad_()
    x.requires_grad_()
    z = x.detach().clone().requires_grad_()
    found = compiled(model, batch_dims={"table": None})({"x": x, "y": y}, table=table)
    found["loss"].backward()
    outs = []
    for xs, ys in zip(z.chunk(4), y.chunk(4), strict=True):
        wanted = reference({"x": xs, "y": ys}, other)
        (wanted["loss"] / 4).backward()
        outs.append(wanted["out"])
    assert_like(model, reference)
    torch.testing.assert_close(x.grad, z.grad)
    torch.testing.assert_close(table.grad, other.grad)
    torch.testing.assert_close(found["out"], torch.cat(outs))


@dataclass
class Answer:
    loss: Tensor
    best: Tensor
    nothing: None = None


def test_a_function_that_closes_over_a_model_and_returns_a_dataclass() -> None:
    model, (x, y) = Chain(), batch()
    reference = copy.deepcopy(model)

    def step(x: Tensor, y: Tensor) -> Answer:
        hidden = model.hidden(x)
        return Answer((hidden - y).pow(2).mean(), hidden.argmax(1))

    answer = compiled(step, schedules.gpipe(4, 4))(x, y)
    answer.loss.backward()
    eager(reference, x, y)
    assert_like(model, reference)
    assert torch.equal(answer.best, reference.hidden(x).argmax(1))
    assert answer.nothing is None


class Logits(Chain):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        out = self.hidden(x)
        return out, out.argmax(1), None


@ORDERS
@pytest.mark.parametrize("carry", ["saved", "recompute"])
def test_without_a_scalar_loss_backward_runs_the_b_jobs(order: str, carry: str) -> None:
    model, (x, y) = Logits(), batch()
    reference = copy.deepcopy(model)
    run = compiled(model, schedules.fslpp(4, 2, 4), order=order, carry=carry)
    out, best, nothing = run(x)
    other = run(2 * x)[0]  # a second call before the first one's backward()
    (out - y).pow(2).mean().backward()
    wanted = torch.cat([reference(part)[0] for part in x.chunk(4)])
    (wanted - y).pow(2).mean().backward()
    assert_like(model, reference)
    assert torch.equal(best, wanted.argmax(1))
    assert nothing is None
    other.sum().backward()
    torch.cat([reference(part)[0] for part in (2 * x).chunk(4)]).sum().backward()
    torch.testing.assert_close(gradients(model), gradients(reference))


@pytest.mark.slow
def test_new_batch_sizes_and_lengths_plan_again_and_old_ones_are_kept() -> None:
    model = Chain()
    reference = copy.deepcopy(model)
    backend = fxsched.backend(schedules.one_f_one_b(4, 4))
    run = torch.compile(model, backend=backend)
    plans = []
    for shape in ((8, 8), (12, 8), (8, 3, 8), (8, 5, 8), (8, 8)):
        x, y = torch.randn(shape), torch.randn(shape)
        run(x, y).backward()
        eager(reference, x, y)
        assert_like(model, reference)
        plans.append(backend.plan)
    assert len({id(plan) for plan in plans}) == 4
    assert len(backend._steps) == 4


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.relu_(self.norms[0](self.first(x)))
        out = self.norms[1](self.second(x))
        out += x  # in place, and x was changed in place before
        return nn.functional.cross_entropy(self.head(out.relu_().mean((2, 3))), y)


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 3, 8, 8), torch.randint(0, 5, (8,))


@pytest.mark.slow
@ORDERS
def test_batchnorm_statistics_equal_eager(order) -> None:
    model, inputs = Normed(), images()
    reference = copy.deepcopy(model)
    compiled(model, order=order)(*inputs).backward()
    eager(reference, *inputs, parts=1)
    assert_like(model, reference)


@pytest.mark.slow
def test_batchnorm_statistics_are_averaged_over_the_workers_of_a_stage() -> None:
    model, inputs = Normed(), images()
    copies = [copy.deepcopy(model) for _ in range(2)]
    way = schedules.ddp(2, 4)
    compiled(model, way, batch_norm="microbatch")(*inputs).backward()
    parts = list(zip(*(x.chunk(4) for x in inputs), strict=True))
    for worker, replica in enumerate(copies):
        for part in parts[worker::2]:
            replica(*part)
    for name, found in model.named_buffers():
        values = [dict(replica.named_buffers())[name] for replica in copies]
        if found.is_floating_point():
            torch.testing.assert_close(found, sum(values) / 2)
        else:
            assert found == 4  # every microbatch counts once


class Regions(Chain):
    """autocast and no_grad regions that stage boundaries fall into."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.layers[:4]:
                x = torch.tanh(layer(x))
        with torch.no_grad():
            fixed = self.layers[4](x.float()) * 2
            fixed = torch.tanh(self.layers[4](fixed))
        return (self.layers[5](x.float()) + fixed - y).pow(2).mean()


@pytest.mark.slow
@pytest.mark.parametrize("way", [schedules.gpipe(4, 4), schedules.fslpp(4, 2, 4)])
def test_autocast_and_no_grad_regions_survive_stage_boundaries(way: Schedule) -> None:
    model, inputs = Regions(6), batch()
    reference = copy.deepcopy(model)
    loss = compiled(model, way)(*inputs)
    loss.backward()
    torch.testing.assert_close(loss.detach(), eager(reference, *inputs))
    assert_like(model, reference)
    assert model.layers[4].weight.grad is None


@pytest.mark.slow
def test_autocast_around_the_call() -> None:
    model, inputs = Chain(), batch()
    reference = copy.deepcopy(model)
    run = compiled(model)
    with torch.autocast("cpu", torch.bfloat16):
        run(*inputs).backward()
        eager(reference, *inputs)
    assert_like(model, reference)


def test_a_frozen_start_has_no_backward_jobs() -> None:
    model, inputs = Chain(frozen=2), batch()
    reference = copy.deepcopy(model)
    backend = fxsched.backend(schedules.gpipe(4, 4))
    torch.compile(model, backend=backend)(*inputs).backward()
    eager(reference, *inputs)
    assert_like(model, reference)
    backward = {job.stage for job in backend.plan.jobs if str(job.direction) == "B"}
    assert backward == {1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("carry", ["saved", "recompute"])
def test_dropout_gives_the_same_numbers_under_every_schedule(carry: str) -> None:
    ways = [
        schedules.gpipe(4, 4),
        replace(schedules.ddp(4), stages=4),
        schedules.fslpp(4, 2, 4),
        Schedule(
            2, 4, 4, w=lambda s, b, d: Placement(b % 2, s % 2), n=lambda s, b, d: -b
        ),
    ]
    model, inputs = Chain(dropout=0.3), batch()
    found = []
    for order, way in zip(("static", "dynamic") * 2, ways, strict=True):
        torch.manual_seed(5)
        model.zero_grad()
        run = compiled(model, way, carry=carry, order=order)
        first, second = run(*inputs), run(*inputs)
        assert first != second  # another step, other numbers
        first.backward()
        found.append([first.detach(), second.detach(), *gradients(model)])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


@pytest.mark.slow
def test_dropout_is_the_same_in_the_recomputed_forward() -> None:
    model, inputs = Chain(dropout=0.5), batch()
    results = []
    for carry in ("saved", "recompute"):
        torch.manual_seed(5)
        model.zero_grad()
        compiled(model, carry=carry)(*inputs).backward()
        results.append(gradients(model))
    torch.testing.assert_close(results[0], results[1])


def test_a_users_pass_sees_every_program() -> None:
    seen = []

    def look(program, request):
        seen.append(len(program.graph.nodes))
        return program

    model, inputs = Chain(), batch()
    compiled(model, passes=[look])(*inputs).backward()
    assert len(seen) == 4


def test_named_modules_start_stages() -> None:
    backend = fxsched.backend(schedules.gpipe(2, 4), stages=["layers.0", "layers.3"])
    torch.compile(Chain(), backend=backend)(*batch())
    modules = [data["modules"] for _, data in backend.plan.stages.nodes(data=True)]
    assert modules == [["layers.0", "layers.1", "layers.2"], ["layers.3"]]


@pytest.mark.slow
def test_one_microbatch_of_one_row() -> None:
    model, inputs = Chain(), batch(4)
    reference = copy.deepcopy(model)
    compiled(model, schedules.gpipe(4, 1))(*inputs).backward()
    eager(reference, *inputs, parts=1)
    assert_like(model, reference)
    model.zero_grad()
    reference.zero_grad()
    compiled(model, schedules.gpipe(4, 4))(*inputs).backward()
    eager(reference, *inputs, parts=4)
    assert_like(model, reference)


@pytest.mark.slow
def test_plan_for_many_workers_on_one_machine() -> None:
    plan = fxsched.plan(Chain(16), schedules.fslpp(16, 4, 16), *batch(16))
    plan.check()
    assert len(plan.programs) == 16
    assert len(plan.jobs) == 2 * 16 * 16
    assert "worker 15" in plan.text()
    assert sum(d["parameters"] for _, d in plan.stages.nodes(data=True)) == 16 * 72
    assert all(d["bytes"] == 32 for _, _, d in plan.stages.edges(data=True))


def test_an_error_in_one_worker_stops_all_and_says_which_job() -> None:
    def fail(program, request):
        for node in program.graph.find_nodes(op="call_module"):
            if str(node.meta["job"]) == "2F1":
                stage = program.get_submodule(str(node.target))
                stage.forward = _raise
        return program

    run = compiled(Chain(), passes=[fail])
    with pytest.raises(ZeroDivisionError) as caught:
        run(*batch())
    assert any("2F" in note for note in caught.value.__notes__)


def _raise(*_: object) -> None:
    raise ZeroDivisionError


def test_identical_stages_are_traced_once() -> None:
    names = [f"layers.{i}" for i in range(4)]
    plan = fxsched.plan(Chain(4), schedules.gpipe(4, 4), *batch(), stages=names)
    flat = [
        program.get_submodule(f"{way}_{stage}.flat_{way}")
        for way in ("forward", "backward")
        for stage, program in ((1, plan.programs[1]), (2, plan.programs[2]))
    ]
    assert flat[0] is flat[1]
    assert flat[2] is flat[3]


class Counting(nn.Module):
    """A buffer that F reads before it writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(torch.tanh(self.first(x) * self.scale.clone()))
        self.scale.add_(1)
        return out.pow(2).mean()


@pytest.mark.parametrize("carry", ["saved", "recompute"])
def test_b_sees_the_buffers_that_its_f_saw(carry: str) -> None:
    model, (x, _) = Counting(), batch()
    reference = copy.deepcopy(model)
    compiled(model, schedules.gpipe(1, 4), carry=carry)(x).backward()
    eager(reference, x, parts=1)
    assert_like(model, reference)


class Positions(nn.Module):
    """Inputs that all rows share, as long as the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x + positions)) * mask
        return x.mean()


@pytest.mark.slow
def test_shared_inputs_may_have_any_length() -> None:
    model, shared = Positions(), {"mask": None, "positions": None}
    run = compiled(model, schedules.gpipe(2, 4), batch_dims=shared)
    for size, length in ((8, 5), (8, 6), (8, 8), (12, 8), (8, 7)):
        x, mask = torch.randn(size, length, 4), torch.ones(length, 1)
        positions = torch.randn(length, 4)
        wanted = model(x, mask, positions)
        torch.testing.assert_close(run(x, mask, positions), wanted)


@pytest.mark.slow
def test_a_changing_number_is_planned_anew() -> None:
    model, (x, y) = Chain(), batch()

    def step(x: Tensor, y: Tensor, scale: float) -> Tensor:
        return model(x, y) * scale

    run = compiled(step)
    for scale in (1, 2, 0.5, 0.25, 1.5):
        torch.testing.assert_close(run(x, y, scale), step(x, y, scale))


def test_a_parameter_changed_before_backward_is_an_error() -> None:
    model, (x, _) = Logits(), batch()
    out = compiled(model, schedules.gpipe(2, 4))(x)[0]
    with torch.no_grad():
        model.layers[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place between the call and its"):
        out.sum().backward()


class Checkpointed(Chain):
    """A part that torch.utils.checkpoint would run again, with dropout in it."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        factor = 3.0 if self.training else 1.0

        def part(z: Tensor) -> Tensor:
            z = torch.tanh(self.layers[0](z)) * factor
            return nn.functional.dropout(z, 0.5, self.training)

        x = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)
        return (self.layers[1](x) - y).pow(2).mean()


def test_checkpointed_parts_train_and_know_training_from_evaluation() -> None:
    model, inputs = Checkpointed(), batch()
    run = compiled(model, schedules.gpipe(1, 4))
    run(*inputs).backward()
    assert all(g is not None for g in gradients(model)[:4])
    model.eval()
    torch.testing.assert_close(run(*inputs), model(*inputs))


class Lookup(nn.Module):
    """A table that all rows share, with a length of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor, table: Tensor) -> Tensor:
        return (self.linear(x) + table[x.argmax(1)] / table.shape[0] - y).pow(2).mean()


def test_a_shared_table_keeps_its_own_length() -> None:
    model, (x, y) = Lookup(), batch()
    run = compiled(model, schedules.gpipe(2, 4), batch_dims={"table": None})
    for length in (12, 16):
        table = torch.randn(length, 8)
        torch.testing.assert_close(run(x, y, table), model(x, y, table))


@pytest.mark.slow
def test_layers_that_have_no_gradient_in_eval_mode_equal_eager() -> None:
    """nn.TransformerEncoderLayer calls an operation without a derivative there."""
    layers = (nn.TransformerEncoderLayer(8, 2, 8, batch_first=True) for _ in range(2))
    model, x = nn.Sequential(*layers).eval(), torch.randn(4, 3, 8)
    with fxsched.backend(schedules.gpipe(2, 2)) as backend, torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
        assert (
            backend.plan is not None and not backend.plan.notes
        )  # no global-batch stage


def test_autocast_of_any_device_is_a_mode_of_the_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find_devices(monkeypatch, "xpu", 1)
    torch.set_autocast_enabled("xpu", True)
    torch.set_autocast_dtype("xpu", torch.bfloat16)
    try:
        then = casts()
        assert then == [("xpu", torch.bfloat16)]
        with pytest.raises(ValueError), modes_after_errors():
            torch.set_autocast_enabled("xpu", False)
            raise ValueError
        assert casts() == then
    finally:
        torch.set_autocast_enabled("xpu", False)
    with with_casts(then):
        assert casts() == then
    assert casts() == []
