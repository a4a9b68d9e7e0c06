"""What is computed on as many rows as values say, and outputs that nobody reads."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import fxsched
from fxsched import PlanError, schedules
from fxsched.capture.refusals import refused
from fxsched.ir.chosen import Selection, chosen_gradients, keep_selection, shape_of

PADDING = -100


class Filled(nn.Module):
    """Predicts the labels that are there, as masked language models do; it keeps its
    temperature within bounds as it runs."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8))
        self.head, self.scale = nn.Linear(8, 5), nn.Parameter(torch.tensor(2.0))
        self.breaks = breaks

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [batch, 7, 6], labels [batch, 7]: the loss, the logits of those labels, and
        a row for each sample."""
        if self.breaks:
            torch._dynamo.graph_break()
        else:
            self.scale.data.clamp_(0, 1.5)
        hidden = self.body(x)
        own = (labels * 1).flatten(1)
        own[:, 0] = PADDING
        there = own.ne(PADDING)
        logits = self.head(hidden[there]) * self.scale
        return F.cross_entropy(logits, own[there]), logits, hidden.sum(1)


def batch(size: int) -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, 5, (size, 7))
    return torch.randn(size, 7, 6), labels.where(torch.rand(size, 7) < 0.4, PADDING)


@pytest.mark.slow
@pytest.mark.parametrize("breaks", [False, True])
def test_as_many_rows_as_values_say(breaks: bool) -> None:
    torch.manual_seed(0)
    model = Filled(breaks)
    eager, schedule = copy.deepcopy(model), schedules.one_f_one_b(2, 4)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (model, eager)]
    with fxsched.compile(model, schedule) as step:
        for size in (8, 12, 8):
            x, labels = batch(size)
            outputs = step(x, labels), eager(x, labels)
            assert_close(*outputs)
            for (loss, *_), optimizer in zip(outputs, optimizers, strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_close(dict(model.named_parameters()), dict(eager.named_parameters()))
        assert "rows of the batch meet in a selection, at" in step.plan.explain()
        with torch.no_grad():
            assert_close(step(x, labels), eager(x, labels))


def test_gradients_where_dispatch_is_below_autograd() -> None:
    """As in an operation's own code, and in Inductor's."""

    def squares(x: Tensor) -> list[Tensor]:
        return [x[x > 0].pow(2).sum()]

    name = keep_selection(Selection(fx.symbolic_trace(squares), ()))
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU)
    x = torch.tensor([2.0, -1.0])
    with torch.no_grad(), torch._C._ExcludeDispatchKeyGuard(keys):
        (gradient,) = chosen_gradients(name, [x], [], [0], [torch.ones(())])
    assert gradient.tolist() == [4.0, 0.0]


class Of(nn.Module):
    def __init__(self, then: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, x)


def dropped(m: Any, x: Tensor) -> Tensor:
    return F.dropout(m.first(x)[x[:, 0] > 0], 0.5).sum()


def in_autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.first(x)[x[:, 0] > 0].float().sum()


def without_gradients(m: Any, x: Tensor) -> Tensor:
    out = m.first(x)
    with torch.no_grad():
        out[x[:, 0] > 0] = m.second(x)
    return out.sum()


def late(m: Any, x: Tensor) -> Tensor:
    y = m.first(x)
    m.first.bias.data.clamp_(0, 1)
    return (y + m.first(x)).sum()


def test_microbatches_of_an_output_with_as_many_rows_as_values_say() -> None:
    backend = fxsched.backend(schedules.gpipe(2, 2), loss_reduction="mean")
    with pytest.raises(
        PlanError, match=r"output 1 has a number of rows that depends on values"
    ):
        torch.compile(Filled(), backend=backend)(*batch(4))


@pytest.mark.parametrize(
    ("then", "text"),
    [
        (dropped, "drawn for a number of rows that depends on values; draw them"),
        (
            in_autocast,
            r"cannot be planned(?=[^()]+\([\s\S]+value of a tensor\); write)",
        ),
        (without_gradients, r"x\[mask\] = values is inside torch.no_grad"),
        (late, "the model writes into its parameter first.bias"),
    ],
)
def test_what_cannot_be_equal_is_refused(
    then: Callable[[Any, Tensor], Tensor], text: str
) -> None:
    step = torch.compile(Of(then), backend=fxsched.backend(schedules.gpipe(2, 2)))
    with pytest.raises(PlanError, match=rf"{text}[\s\S]+test_chosen_rows\.py:\d+"):
        step(torch.randn(4, 4))


def test_an_error_says_which_line_makes_a_size_that_values_say() -> None:
    graph, size = fx.Graph(), ShapeEnv().create_unbacked_symint()
    count = graph.call_function(torch.sum, (graph.placeholder("x"),))
    node = graph.call_function(torch.zeros, (count,))
    count.meta = {"example_value": size, "stack_trace": 'File "m.py", line 3, in f'}
    node.meta["stack_trace"] = 'File "m.py", line 4, in f'
    with pytest.raises(PlanError) as caught, refused(node):
        bool(size > 3)
    message = (
        r"size that m.py:3, in f: +makes of the value of a tensor\); write it with"
    )
    assert re.search(message, str(caught.value))
    assert "u0" not in str(caught.value)


def between(m: Any, x: Tensor) -> Tensor:
    out = m.first(x)
    before = out[out.detach()[:, 0] > 0].sum() + out.sum()
    out[x[:, 0] > 0] = m.second(x[x[:, 0] > 0])
    return before * out.sum()


def test_a_value_may_be_read_before_rows_are_picked_into_it() -> None:
    torch.manual_seed(0)
    model, x = Of(between), torch.randn(4, 4)
    eager = copy.deepcopy(model)
    step = torch.compile(model, backend=fxsched.backend(schedules.gpipe(2, 2)))
    found, wanted = step(x), eager(x)
    torch.testing.assert_close(found, wanted)
    found.backward()
    wanted.backward()
    for mine, its in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)


def images(h: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    h[mask] = values.flatten(0, 1)
    return h


def images_again(h: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    once = images(h, values, mask).tanh()
    return torch.index_put(once, (mask,), values.flatten(0, 1), accumulate=True)


def of_a_view(h: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    h[:, 1:][mask[:, 1:]] = values.flatten(0, 1)
    return h


def of_a_dimension(h: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    h[:, mask[0]] = values
    return h


def of_numbers(h: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    h[mask[..., None].expand_as(h)] = values.flatten()
    return h


def a_row(h: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    h[mask] = values[:1, 0]
    return h * torch.index_put(h, (mask,), values[0, 1])


def a_value(h: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    h[mask.any(1)] = values.detach().amax()
    h[:, 1:][h[:, 1:] > 0.2] = 0.2
    return h


def one_value(h: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    h[mask] = 0.5
    return h * values.sum((1, 2))[:, None, None]


def one_row(h: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return one_value(h.index_put((mask,), torch.arange(6.0)[None]), values, mask)


class Images(nn.Module):
    """Puts what it computes of pictures where the mask is, as Kosmos2 does."""

    def __init__(self, put: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.put, self.body = put, nn.Linear(6, 6)
        self.pictures, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor, pictures: Tensor, mask: Tensor) -> Tensor:
        h = self.put(self.body(x).sin().clone(), self.pictures(pictures), mask)
        return self.head(h).pow(2).mean()


@pytest.mark.parametrize(
    "put",
    [
        *(images, images_again, of_a_view, of_a_dimension, of_numbers, a_row, a_value),
        *(one_value, one_row),
    ],
)
def test_values_where_a_mask_is(
    put: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    model, mask = Images(put), torch.zeros(8, 5).bool()
    mask[:, 1::2] = True
    eager, inputs = copy.deepcopy(model), (torch.randn(8, 5, 6), torch.randn(8, 2, 6))
    backend = fxsched.backend(schedules.gpipe(2, 4))
    step = torch.compile(model, backend=backend)
    found, wanted = step(*inputs, mask), eager(*inputs, mask)
    assert_close(found, wanted)
    found.backward()
    wanted.backward()
    for mine, its in zip(model.parameters(), eager.parameters(), strict=True):
        assert_close(mine.grad, its.grad)
    joins = "rows of the batch meet" in backend.plan.explain()
    assert joins == (put not in (one_value, one_row))


def test_more_values_than_the_mask_has_places_raise_as_in_eager() -> None:
    step = torch.compile(Images(images), backend=fxsched.backend(schedules.gpipe(2, 4)))
    x, pictures, mask = torch.randn(8, 5, 6), torch.randn(8, 2, 6), torch.zeros(8, 5)
    mask[:, 1] = 1
    with pytest.raises(RuntimeError, match="shape mismatch: value tensor of shape"):
        step(x, pictures, mask.bool())


class Heads(nn.Module):
    """Two outputs, of one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        other = torch.zeros_like(hidden)
        other.copy_(self.two(hidden.detach()))
        return self.one(hidden), other


@pytest.mark.parametrize("taken", [(0,), (1,), (0, 1)])
def test_weights_that_no_used_output_reaches_get_no_gradient(
    taken: tuple[int, ...],
) -> None:
    model = Heads()
    eager, x = copy.deepcopy(model), torch.randn(4, 4)
    step = torch.compile(model, backend=fxsched.backend(schedules.gpipe(2, 2)))
    for call in (step, eager):
        outputs = call(x)
        torch.stack([outputs[i].pow(2).sum() for i in taken]).sum().backward()
    for (name, one), two in zip(
        model.named_parameters(), eager.parameters(), strict=True
    ):
        assert (one.grad is None) == (two.grad is None), name
        if two.grad is not None:
            assert_close(one.grad, two.grad)


class WritesAside(nn.Module):
    """A write on the whole batch in a block without gradients; what it writes into has
    one, which goes on to what made it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        with torch.no_grad():
            h.cumsum_(0)
            h.masked_scatter_(x > 0, 3 * x)
        return self.last(h).square().mean()


def test_gradients_go_through_a_write_in_a_block_without_gradients() -> None:
    torch.manual_seed(0)
    model, x = WritesAside(), torch.randn(8, 4)
    found = fxsched.verify(model, schedules.gpipe(2, 2), x)
    assert found.passed


class Copies(TorchDispatchMode):
    """Notes whether each copy to another device waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[bool] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.waits.append(not (kwargs or {}).get("non_blocking"))
        return func(*args, **(kwargs or {}))


def test_a_shape_comes_to_a_device_without_a_wait() -> None:
    with FakeTensorMode(), Copies() as copies:
        shape = shape_of(torch.empty(3, 4, device="cuda"))
    assert shape.device.type == "cuda" and copies.waits == [False]
    assert shape_of(torch.empty(3, 4)).tolist() == [3, 4]
