"""Inputs whose values are numbers of rows of the whole batch, items written into it,
and CTC's lengths: losses and parameters are eager's."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, Schedule, schedules
from fxsched.ir.ctc import ctc_loss
from tests.started_ranks import run_ranks
from tests.whole_batch import drawn

BATCH, WIDTH, CLASSES = 8, 6, 3
Forward = Callable[..., Tensor]


class Model(nn.Module):
    """A tower, whose rows `between` may let meet, and a head."""

    def __init__(self, between: Forward) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, WIDTH)
        self.tower, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("table", torch.randn(BATCH, 2))  # not of the batch
        self.between = between

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.between(self, *inputs)


def bags(m: Any, ids: Tensor, offsets: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(torch.tanh(m.tower(m.bag(ids, offsets)))), y)


def pooled(add: Callable[..., Tensor], m: Any, x: Tensor, of: Tensor, y: Tensor) -> Any:
    hidden = torch.relu(m.tower(x))
    return F.cross_entropy(m.head(add(hidden.new_zeros(len(y), WIDTH), of, hidden)), y)


def index_add(zeros: Tensor, of: Tensor, values: Tensor) -> Tensor:
    return zeros.index_add(0, of, values)


def scatter_add(zeros: Tensor, of: Tensor, values: Tensor) -> Tensor:
    return zeros.scatter_add(0, of[:, None].expand_as(values), values)


def put(zeros: Tensor, of: Tensor, values: Tensor) -> Tensor:
    return zeros.index_put((of,), values, accumulate=True)


def convolved(m: Any, x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
    hidden = m.tower(x)
    return F.cross_entropy(m.head(index_add(x * 0, edges[1], hidden[edges[0]])), y)


def classes(add: Callable[..., Tensor], m: Any, x: Tensor, y: Tensor) -> Tensor:
    return add(x.new_zeros(CLASSES, WIDTH), y, torch.relu(m.tower(x))).tanh().sum()


def chosen(choose: Callable[..., Tensor], m: Any, x: Tensor, y: Tensor) -> Tensor:
    rows = torch.tanh(m.tower(x))
    return (m.head(rows) * m.head(choose(rows, y * 3 % BATCH))).mean()


def ctc(m: Any, x: Tensor, y: Tensor, times: Tensor, lengths: Tensor) -> Tensor:
    scores = m.head(torch.relu(m.tower(x))).transpose(0, 1).log_softmax(-1)
    return F.ctc_loss(scores, y, times, lengths, zero_infinity=True)


def broken(m: Any, *inputs: Tensor) -> Tensor:
    torch._dynamo.graph_break()  # so that torch.export traces it
    return ctc(m, *inputs)


def written(write: Callable[[Tensor], object], m: Any, x: Tensor, y: Tensor) -> Tensor:
    rows = torch.tanh(m.tower(x)) * 1
    write(rows)
    return F.cross_entropy(m.head(rows), y)


def viewed(m: Any, x: Tensor, y: Tensor) -> Tensor:
    rows = torch.tanh(m.tower(x)) * 1
    rows[0] = 0.0
    return F.cross_entropy(m.head(rows.view(-1, 2, 3).flatten(1)), y)


def columns(m: Any, x: Tensor, y: Tensor) -> Tensor:
    rows = torch.tanh(m.tower(x)) * 1
    rows[:, torch.tensor([0, 2])] = m.table
    return F.cross_entropy(m.head(rows), y)


def added_columns(m: Any, x: Tensor, y: Tensor) -> Tensor:
    rows = torch.tanh(m.tower(x))
    return F.cross_entropy(m.head(rows.index_add(1, torch.tensor([3, 2]), m.table)), y)


def first_row(rows: Tensor) -> None:
    rows[0] = 0.0


def range_in_front(rows: Tensor) -> None:
    rows[:2, 1] = 0.0


def all_rows(rows: Tensor) -> None:
    rows[:] = rows - rows.mean(0)


def in_place(rows: Tensor) -> None:
    rows += rows.mean(0)


def column(rows: Tensor) -> None:
    rows[:, 0] = rows.mean(0)[0]


def through_view(rows: Tensor) -> None:
    rows.view(-1, 2, 3)[:, 1] -= rows.mean(0)[:3]


X, Y = torch.randn(BATCH, WIDTH), torch.arange(BATCH) % CLASSES
OFFSETS = torch.tensor([0, 1, 5, 6, 9, 12, 13, 20])
NODES = torch.randn(32, WIDTH), torch.arange(BATCH).repeat_interleave(4)
UNEVEN = torch.arange(BATCH).repeat_interleave(torch.tensor([5, 3, 1, 6, 4, 2, 7, 2]))
SPEECH = (
    torch.randn(BATCH, 9, WIDTH),
    torch.randint(1, CLASSES, (BATCH, 4)),
    torch.tensor([9, 8, 9, 7, 9, 1, 9, 9]),  # the sixth is too short: infinite
    torch.tensor([1, 4, 2, 0, 3, 4, 2, 1]),
)
FLAT = torch.cat([y[:n] for y, n in zip(SPEECH[1], SPEECH[3].tolist(), strict=True)])

CASES: dict[str, tuple[Forward, tuple[Tensor, ...], dict[int, int | None]]] = {
    "bags": (bags, (torch.arange(24) % 20, OFFSETS, Y), {0: 0}),
    "bags of uneven length": (bags, (torch.arange(23) % 20, OFFSETS, Y), {0: None}),
    **{
        f"graphs by {add.__name__}": (partial(pooled, add), (*NODES, Y), {0: 0, 1: 0})
        for add in (index_add, scatter_add, put)
    },
    "uneven graphs": (
        *(partial(pooled, scatter_add), (NODES[0][:30], UNEVEN, Y)),
        {0: None, 1: None},
    ),
    "edges": (convolved, (X, torch.stack([Y, Y.flip(0)])[:, :5], Y), {1: None}),
    **{
        f"classes by {add.__name__}": (partial(classes, add), (X, Y), {})
        for add in (index_add, scatter_add, put)
    },
    "rows by number": (partial(chosen, lambda z, j: z[j]), (X, Y), {}),
    "rows of a gather": (
        partial(chosen, lambda z, j: z.gather(0, j[:, None].expand_as(z))),
        *((X, Y), {}),
    ),
    "ctc": (ctc, SPEECH, {}),
    "ctc of targets one after another": (
        *(ctc, (SPEECH[0], FLAT, *SPEECH[2:])),
        {1: None},
    ),
    "ctc, exported": (broken, SPEECH, {}),
    "views after a write": (viewed, (X, Y), {}),
    "columns as long as the batch": (columns, (X, Y), {}),
    "columns added as long as the batch": (added_columns, (X, Y), {}),
    **{
        f"writes {write.__name__}": (partial(written, write), (X, Y), {})
        for write in (
            *(first_row, range_in_front, all_rows),
            *(in_place, column, through_view),
        )
    },
}
SCHEDULES: tuple[Callable[[], Schedule], ...] = (
    lambda: schedules.one_f_one_b(2, 4),
    lambda: schedules.ddp(2, 4),
    lambda: schedules.fsdp(2, 4),
    lambda: schedules.interleaved(2, 4, 2),
    lambda: drawn(2),
)


def train(name: str, schedule: Schedule) -> None:
    """Three steps: losses and parameters are eager's."""
    between, inputs, dims = CASES[name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(between).double()
    eager = copy.deepcopy(model)
    inputs = tuple(t.double() if t.is_floating_point() else t for t in inputs)
    with fxsched.backend(schedule, batch_dims=dims) as backend:
        step = torch.compile(model, backend=backend)
        both = [torch.optim.SGD(m.parameters(), 0.1, 0.9) for m in (model, eager)]
        for _ in range(3):
            losses = step(*inputs), eager(*inputs)
            torch.testing.assert_close(*losses)
            for loss, optimizer in zip(losses, both, strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    state = fxsched.full_state_dict(model)
    for key, value in eager.state_dict().items():
        torch.testing.assert_close(state[key], value)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_numbers_of_rows_pick_is_of_the_whole_batch(name: str) -> None:
    train(name, SCHEDULES[list(CASES).index(name) % len(SCHEDULES)]())


@pytest.mark.slow
def test_ranks_are_eager_s() -> None:
    done = run_ranks(2, "tests.ranks_row_numbers")
    assert done.stdout.count("equal to eager") == 2


def test_ctc_losses_of_samples_stay_apart() -> None:
    with fxsched.backend(schedules.gpipe(2, 4)) as backend:
        torch.compile(Model(ctc), backend=backend)(*SPEECH).backward()
        assert "meet" not in backend.plan.explain()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("between", "inputs", "dims", "option"),
    [
        (bags, (torch.arange(24) % 20, OFFSETS, Y), {}, '{"inputs[0]": 0}'),
        (
            *(partial(pooled, index_add), (*NODES, Y), {}),
            '{"inputs[0]": 0, "inputs[1]": 0}',
        ),
        (
            *(convolved, (X, torch.stack([Y, Y.flip(0)])[:, :5], Y), {}),
            '{"inputs[1]": None}',
        ),
        (
            lambda m, x, numbers: chosen(lambda z, j: z[numbers], m, x, numbers),
            *((X, torch.arange(BATCH).flip(0)), {1: None}, '{"inputs[1]": 0}'),
        ),
    ],
)
def test_the_option_that_an_error_names_makes_it_exact(
    between: Forward, inputs: tuple[Tensor, ...], dims: dict[Any, Any], option: str
) -> None:
    torch._dynamo.reset()
    model, schedule = Model(between), schedules.gpipe(2, 4)
    with pytest.raises(PlanError, match=re.escape(f"batch_dims={option}")):
        backend = fxsched.backend(schedule, batch_dims=dims)
        torch.compile(model, backend=backend)(*inputs)
    torch._dynamo.reset()
    with fxsched.backend(schedule, batch_dims=ast.literal_eval(option)) as backend:
        loss = torch.compile(model, backend=backend)(*inputs)
    torch.testing.assert_close(loss, model(*inputs))


class Listed(nn.Module):
    """Goes through its rows as a list, which it also returns, as LLaVA's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("table", torch.randn(BATCH, 2))  # not of the batch

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        rows = list(torch.tanh(self.tower(x)))
        scores = self.head(torch.stack(rows))
        return {"loss": F.cross_entropy(scores, y), "rows": rows, "scores": scores}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SCHEDULES)))
def test_a_list_of_samples_comes_back_in_order(number: int) -> None:
    torch._dynamo.reset()
    model = Listed()
    with fxsched.backend(SCHEDULES[number]()) as backend:
        found, wanted = torch.compile(model, backend=backend)(X, Y), model(X, Y)
    torch.testing.assert_close(found, wanted)
    assert len(found["rows"]) == BATCH


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("alone", [False, True])
def test_our_ctc_loss_is_torch_s(reduction: str, alone: bool) -> None:
    scores = torch.randn(9, BATCH, CLASSES, dtype=torch.float64)
    inputs = (scores, *SPEECH[1:])
    if alone:
        inputs = (scores[:, 0], SPEECH[1][0, :1], SPEECH[2][0], SPEECH[3][0])
    logits = [inputs[0].clone().requires_grad_() for _ in range(2)]
    for function, own in zip((ctc_loss, F.ctc_loss), logits, strict=True):
        given: Any = own.log_softmax(-1), *inputs[1:]
        loss = function(*given, reduction=reduction, zero_infinity=True)
        (loss * torch.arange(1, loss.numel() + 1).reshape(loss.shape)).sum().backward()
    torch.testing.assert_close(logits[0].grad, logits[1].grad)
