"""What of a call is the batch: the rule, what is declared, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, schedules
from fxsched.cli import main as cli

ROWS, WIDTH = 8, 4


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Linear(nn.Module):
    """A linear layer on either side of `between`, which gets what the model gets."""

    def __init__(self, between: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.between = between

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.between(self.last(hidden), *args, **kwargs)


def equal(
    model: nn.Module,
    *args: Any,
    batch_dims: dict[str | int, int | None] | None = None,
    **kwargs: Any,
) -> None:
    """Loss and gradients, also of inputs, are those of eager PyTorch."""
    reference = copy.deepcopy(model)
    tensors = [t for t in [*args, *kwargs.values()] if isinstance(t, Tensor)]
    floats = [t.requires_grad_() for t in tensors if t.is_floating_point()]
    for tensor in floats:
        tensor.grad = None
    wanted = reference(*args, **kwargs)
    wanted.mean().backward()
    inputs = [t.grad for t in floats]
    for tensor in floats:
        tensor.grad = None
    backend = fxsched.backend(schedules.gpipe(2, 4), batch_dims=batch_dims)
    result = torch.compile(model, backend=backend)(*args, **kwargs)
    result.mean().backward()
    torch.testing.assert_close(result, wanted)
    torch.testing.assert_close([t.grad for t in floats], inputs)
    torch.testing.assert_close(
        [p.grad for p in model.parameters()], [p.grad for p in reference.parameters()]
    )


def refused(message: str, model: Any, *args: Any, **options: Any) -> None:
    backend = fxsched.backend(schedules.gpipe(2, 4), **options)
    with pytest.raises(PlanError, match=message):
        torch.compile(model, backend=backend)(*args)


def scores(hidden: Tensor, cand: Tensor) -> Tensor:
    """Candidates of each query, in a row."""
    return (hidden[:, None] * cand.view(hidden.shape[0], -1, WIDTH)).sum(2)


@pytest.mark.slow
def test_a_multiple_of_the_batch_is_declared() -> None:
    q, cand = torch.randn(ROWS, WIDTH), torch.randn(3 * ROWS, WIDTH)
    equal(Linear(scores), q, cand, batch_dims={"args[0]": 0})
    equal(Linear(scores), q, cand, batch_dims={1: 0})


def test_rows_of_the_others_apart_from_the_batch() -> None:
    """A multiple that the model never holds against the batch."""

    def both(hidden: Tensor, cand: Tensor) -> Tensor:
        return hidden.pow(2).mean() + cand.pow(2).mean()

    q, cand = torch.randn(ROWS, WIDTH), torch.randn(3 * ROWS, WIDTH)
    equal(Linear(both), q, cand, batch_dims={1: 0})


def test_a_multiple_is_refused_until_it_is_declared() -> None:
    def model(q: Tensor, cand: Tensor) -> Tensor:
        return scores(q @ weight, cand).mean()

    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    refused(
        r"arguments of the model differ in length[\s\S]*"
        r"\n  q     \[8, 4\]\n  cand  \[24, 4\]\n[\s\S]*"
        r'fxsched.backend\(schedule, batch_dims=\{"cand": 0\}\)',
        model,
        torch.randn(ROWS, WIDTH),
        torch.randn(3 * ROWS, WIDTH),
    )


class Sequence(nn.Module):
    """Sequence first, [time, samples, width], as nn.Transformer's default."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)).cumsum(0)  # mixes times, not samples
        return (self.last(hidden)[-1, :, 0] - y).pow(2).mean()


@pytest.mark.parametrize("dim", [1, -2])
def test_dimension_1_has_the_samples(dim: int) -> None:
    x, y = torch.randn(5, ROWS, WIDTH), torch.randn(ROWS)
    equal(Sequence(), x, y, batch_dims={"x": dim})


def test_sequence_first_is_refused_until_it_is_declared() -> None:
    line = r'batch_dims=\{"x": 1\}\)'
    x, y = torch.randn(5, ROWS, WIDTH), torch.randn(ROWS)
    refused(line, Sequence(), x, y)
    refused(line, Sequence(), torch.randn(4 * ROWS, ROWS, WIDTH)[1:], y)


class Rows(nn.Module):
    """What comes out has its samples along dimension 1 too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def test_outputs_and_gradients_of_inputs_along_dimension_1() -> None:
    equal(Rows(), torch.randn(5, ROWS, WIDTH), batch_dims={"x": 1})


@pytest.mark.slow
def test_what_all_samples_share_is_declared() -> None:
    """As long as the batch, or not."""

    def scaled(hidden: Tensor, scale: Tensor) -> Tensor:
        return (hidden * scale.mean() + scale.pow(2).sum()).pow(2).mean()

    x = torch.randn(ROWS, WIDTH)
    equal(Linear(scaled), x, torch.randn(ROWS), batch_dims={1: None})
    equal(Linear(scaled), x, torch.randn(5), batch_dims={1: None})
    equal(Linear(scaled), x, torch.randn(1), batch_dims={1: None})


def test_one_row_beside_the_batch_is_refused_until_it_is_declared() -> None:
    def model(x: Tensor, ids: Tensor) -> Tensor:
        return (x @ weight + ids).pow(2).mean()

    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    inputs = torch.randn(ROWS, WIDTH), torch.randn(1, WIDTH)
    refused(
        r'your batch:\n.*batch_dims=\{"ids": None\}\)\ngive the dim', model, *inputs
    )


def test_most_of_a_length_decide_nothing() -> None:
    def model(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> Tensor:
        return (a + b + c).mean() + ((d + e) @ weight).mean()

    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    inputs = [torch.randn(12, WIDTH)] * 3 + [torch.randn(8, WIDTH)] * 2
    refused("differ in length", model, *(x.clone() for x in inputs))


@pytest.mark.slow
def test_packed_patches_beside_sequences() -> None:
    """Qwen2-VL's layout: two patches for each sample."""

    class Vision(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.patch = nn.Embedding(9, WIDTH), nn.Linear(6, WIDTH)

        def forward(self, ids: Tensor, patches: Tensor) -> Tensor:
            seen = self.patch(patches).unflatten(0, (-1, 2))
            return torch.cat([self.embed(ids), seen], 1).cumsum(1).pow(2).mean()

    ids, patches = torch.randint(9, (ROWS, 3)), torch.randn(2 * ROWS, 6)
    refused(r'batch_dims=\{"patches": 0\}', Vision(), ids, patches)
    equal(Vision(), ids, patches, batch_dims={"patches": 0})


def test_rows_that_are_no_multiple_of_the_samples() -> None:
    def model(x: Tensor, packed: Tensor) -> Tensor:
        return (x @ weight).mean() + (packed @ weight).mean()

    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    refused(
        r"has length 17 .*multiple of 8, the length of x,[\s\S]*packed  \[17, 4\]",
        model,
        torch.randn(ROWS, WIDTH),
        torch.randn(17, WIDTH),
        batch_dims={"packed": 0},
    )


class Stateful(nn.Module):
    """Plain tensors on the root module, as many rows as the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table, self.tables = torch.randn(ROWS, WIDTH), [torch.randn(ROWS, WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        near = (hidden[:, None] - self.table).pow(2).sum(2).softmax(1)
        return (self.last(near @ self.tables[0]) - hidden).pow(2).mean()


def test_attributes_of_the_root_module_are_state() -> None:
    equal(Stateful(), torch.randn(ROWS, WIDTH))


def test_closures_globals_and_objects_of_methods_are_state() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    table = torch.randn(ROWS, WIDTH)

    def closure(x: Tensor) -> Tensor:
        return (model(x)[:, None] - table).pow(2).sum(2).amin(1).mean()

    class Trainer:
        def __init__(self) -> None:
            self.model, self.table = model, table

        def step(self, x: Tensor) -> Tensor:
            found = (self.model(x)[:, None] - self.table).pow(2).sum(2).amin(1)
            return found.mean()

    x = torch.randn(ROWS, WIDTH)
    for step in (closure, Trainer().step):
        backend = fxsched.backend(schedules.gpipe(2, 4))
        torch.testing.assert_close(torch.compile(step, backend=backend)(x), step(x))


@dataclass
class Inputs:
    x: Tensor
    more: dict[str, list[Tensor]]


@pytest.mark.slow
def test_names_inside_of_dicts_lists_and_dataclasses() -> None:
    def model(batch: Inputs, **others: Tensor) -> Tensor:
        x = batch.x @ weight + batch.more["cand"][0].unflatten(0, (-1, 2)).sum(1)
        return (x * others["scale"].mean()).pow(2).mean()

    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def inputs() -> tuple[Inputs, Tensor]:
        cand = torch.randn(2 * ROWS, WIDTH)
        return Inputs(torch.randn(ROWS, WIDTH), {"cand": [cand]}), torch.randn(5)

    batch, scale = inputs()
    backend = fxsched.backend(schedules.gpipe(2, 4))
    line = r"\"batch\.more\['cand'\]\[0\]\": 0, \"scale\": None"
    with pytest.raises(PlanError, match=line):
        torch.compile(model, backend=backend)(batch, scale=scale)
    for key in ("batch.more['cand'][0]", "batch.more"):
        dims = {key: 0, "scale": None}
        backend = fxsched.backend(schedules.gpipe(2, 4), batch_dims=dims)
        loss = torch.compile(model, backend=backend)(batch, scale=scale)
        torch.testing.assert_close(loss, model(batch, scale=scale))


@pytest.mark.slow
def test_a_name_that_is_none_of_the_call() -> None:
    x, y = torch.randn(5, ROWS, WIDTH), torch.randn(ROWS)
    message = r"called without 'X'; its arguments are x, y; did you mean 'x'\?"
    refused(message, Sequence(), x, y, batch_dims={"X": 1})
    message = r"batch_dims=\{2: \.\.\}\): the model is called with 2 arguments by pos"
    refused(message, Sequence(), x, y, batch_dims={2: 1})
    with pytest.raises(PlanError, match="called without 'X'"):
        fxsched.plan(Sequence(), schedules.ddp(1), x, y, batch_dims={"X": 1})
    message = r"t has no dimension 0; its shape is \[\]"
    refused(message, lambda x, t: x.mean() * t, y, y.sum(), batch_dims={"t": 0})
    message = r"x has no dimension 3; its shape is \[5, 8, 4\]"
    refused(message, Sequence(), x, y, batch_dims={"x": 3})


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ("x", r"backend\(batch_dims='x'\): give a dict, such as"),
        ({"x": "1"}, r"batch_dims=\{'x': '1'\}\): give a dimension, or None"),
        ({"": 1}, r"batch_dims=\{'': \.\.\}\): name an argument, or give its pos"),
        ({None: 1}, r"batch_dims=\{None: \.\.\}\): name an argument, or give its pos"),
    ],
)
def test_batch_dims_of_other_kinds(dims: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        fxsched.backend(schedules.gpipe(2, 4), batch_dims=dims)


@pytest.mark.slow
def test_a_table_whose_length_the_model_fixes() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, ROWS), nn.Linear(ROWS, WIDTH)

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return (self.first(x) @ table + self.last(table).mean()).pow(2).mean()

    inputs = torch.randn(ROWS, WIDTH), torch.randn(ROWS, ROWS)
    refused(
        r'the length 8 of table .*[\s\S]*batch_dims=\{"table": None\}', Table(), *inputs
    )
    equal(Table(), *inputs, batch_dims={"table": None})


def test_one_tensor_for_two_arguments() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        return (x @ weight - y).pow(2).mean()

    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    x = torch.randn(ROWS, WIDTH)
    refused("x and y are one tensor", model, x, x, batch_dims={"y": None})


def test_samples_that_are_compared_with_each_other() -> None:
    def model(x: Tensor, same: Tensor) -> Tensor:
        hidden = x @ weight
        return (hidden @ hidden.T - same).pow(2).mean()

    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    refused(
        r"the batch size is fixed to 8 by\n.*hidden @ hidden\.T - same",
        model,
        torch.randn(ROWS, WIDTH),
        torch.randn(ROWS, ROWS),
    )


@pytest.mark.slow
def test_plan_explain_and_profile_take_them() -> None:
    x, y = torch.randn(5, ROWS, WIDTH), torch.randn(ROWS)
    way, dims = schedules.gpipe(2, 4), {"x": 1}
    assert fxsched.plan(Sequence(), way, x, y, batch_dims=dims).trains
    assert "2 stages" in fxsched.explain(Sequence(), way, x, y, batch_dims=dims)
    assert fxsched.profile(Sequence(), x, y, microbatches=4, repeats=1, batch_dims=dims)
    for each in (fxsched.plan, fxsched.explain):
        with pytest.raises(PlanError, match=r'batch_dims=\{"x": 1\}'):
            each(Sequence(), way, x, y)


def test_the_command_line_takes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        "import torch\n"
        "linear = torch.nn.Linear(4, 4)\n"
        "def step(x, y): return (linear(x)[-1] - y).pow(2).mean()\n"
        "def make(): return step, (torch.randn(5, 8, 4), torch.randn(8, 4))\n"
    )
    command = ["plan", f"{file}:make", "--schedule", "gpipe", "--workers", "1"]
    command += ["--microbatches", "4"]
    cli.main([*command, "--batch-dims", "x=1"])
    assert "1 stage\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main([*command, "--batch-dims", "x"])
    assert "such as x=1 or scale=none" in capsys.readouterr().err
