"""Operators of users, and operations that are given graphs: what is said of them, or
known, decides what is computed in microbatches and in shards."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, fx, nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn.attention import flex_attention as flex
from torch.utils.flop_counter import FlopCounterMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import fxsched
from fxsched import PlanError, schedules
from fxsched.capture.refusals import refusal
from fxsched.placement.declared import DECLARED

from ..cases import anything
from ..placed_operators import (
    LENGTH,
    attention,
    attention_backward,
    by_flex,
    by_operator,
    scaled,
)
from ..started_ranks import run_ranks
from ..traced_once import Switch

ROWS = {(Shard(0), Replicate()): Shard(0)}
SCHEDULES = {
    "1f1b": lambda: schedules.one_f_one_b(2, 4),
    "fsdp": lambda: schedules.fsdp(2, 4),
    "interleaved": lambda: schedules.interleaved(2, 4),
    "random": lambda: anything(3),
    "shards": lambda: schedules.sharded(schedules.one_f_one_b(2, 4), 2),
}


@pytest.fixture(autouse=True)
def _said(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test says holds for it alone. On CPUs FlexAttention has a backward, which
    its front refuses."""
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    before = dict(DECLARED)
    yield
    DECLARED.clear()
    DECLARED.update(before)


class Llama(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        sizes = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(
            **sizes, **heads, num_hidden_layers=2, attn_implementation=kind
        )
        self.model = transformers.LlamaForCausalLM(config)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss


def assert_trained(
    switch: Callable[..., Tensor], model: nn.Module, eager: nn.Module, *inputs: Tensor
) -> None:
    """Two steps with momentum."""
    pair = [(switch, model), (eager, eager)]
    steps = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for _, m in pair]
    for _ in range(2):
        losses = [run(*inputs) for run, _ in pair]
        torch.testing.assert_close(*losses)
        for loss, optimizer in zip(losses, steps, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for found, wanted in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["operator", "flex"])
def test_a_llama_is_trained_without_stages_of_the_whole_batch(kind: str) -> None:
    ALL_ATTENTION_FUNCTIONS.register("operator", by_operator)
    ALL_ATTENTION_FUNCTIONS.register("flex", by_flex)
    every, heads = (Shard(0),) * 3, (Shard(1),) * 3
    fxsched.placements(attention, forward={every: Shard(0), heads: Shard(1)})
    torch.manual_seed(0)
    model, ids = Llama(kind), torch.randint(24, (8, LENGTH))
    start = copy.deepcopy(model.state_dict())
    switch = Switch(model, fxsched.backend(schedules.ddp(2)))
    names = SCHEDULES if kind == "operator" else ("1f1b", "fsdp", "shards")
    for name in names:
        eager = Llama(kind)
        for each in (model, eager):
            each.load_state_dict(start)
        with fxsched.backend(SCHEDULES[name](), profile=True) as backend:
            assert_trained(partial(switch, backend), model, eager, ids)
            assert not any(event.job.joint for event in backend.timeline), name
    text = fxsched.explain(Llama(kind), SCHEDULES["shards"](), ids)
    for rows, name in ((16, "q"), (8, "k"), (8, "v")):
        assert re.search(rf"{name}_proj.weight +2 +{rows} x 16 +column", text)


@pytest.mark.slow
def test_ranks_are_eager_s() -> None:
    done = run_ranks(2, "tests.ranks_placements")
    assert done.stdout.count("equal to eager") == 2


@pytest.mark.slow
def test_transformers_own_flex_attention_is_trained() -> None:
    torch.manual_seed(0)
    model, ids = Llama("flex_attention"), torch.randint(24, (8, LENGTH))
    eager = Llama("eager")
    eager.load_state_dict(model.state_dict())
    with fxsched.backend(SCHEDULES["shards"](), profile=True) as backend:
        assert_trained(torch.compile(model, backend=backend), model, eager, ids)
        assert not any(event.job.joint for event in backend.timeline)


class Net(nn.Module):
    """compute(self, rows, *others) between two layers."""

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.table = nn.Parameter(torch.randn(2, 6) / 4)
        self.compute = compute

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        y = self.compute(self, self.first(x), *others)
        return self.last(y.tanh()).square().mean()

    @torch.compiler.nested_compile_region
    def again(self, x: Tensor) -> Tensor:
        return self.first(x).sin()


def attended(y: Tensor, **given: Any) -> Tensor:
    q = y.unflatten(-1, (2, 4)).transpose(1, 2)
    return flex.flex_attention(q, q, q, **given).transpose(1, 2).flatten(2)


def masked(net: Net, y: Tensor, lengths: Tensor) -> Tensor:
    count, size = len(lengths), y.shape[1]
    blocks = flex.create_block_mask(
        lambda b, h, i, j: j < lengths[b],
        *(count, None, size, size, "cpu"),
        BLOCK_SIZE=(4, 4),
    )
    return attended(y, block_mask=blocks)


def lengths(net: Net, y: Tensor, lengths: Tensor) -> Tensor:
    return attended(y, score_mod=lambda s, b, h, i, j: s * (j < lengths[b]))


def biased(net: Net, y: Tensor) -> Tensor:
    return attended(y, score_mod=lambda s, b, h, i, j: s + net.table[h, j])


def numbered(net: Net, y: Tensor) -> Tensor:
    return attended(y, score_mod=lambda s, b, h, i, j: s * (1 + b))


def sized(net: Net, y: Tensor) -> Tensor:
    size = y.shape[0]
    return attended(y, score_mod=lambda s, b, h, i, j: s / size)


def looked_up(net: Net, y: Tensor, n: Tensor) -> Tensor:
    """By the row of the batch, and by what isn't one."""
    return attended(y, score_mod=lambda s, b, h, i, j: s * (n[b] > n[j]))


def mapped(net: Net, y: Tensor) -> Tensor:
    from torch._higher_order_ops.map import map as each

    result: Tensor = each(lambda row, w: (row @ w).sin(), y, net.first.weight)
    return result


GRAPHS = {
    "flex": lambda net, y: attended(y),
    "masked": masked,
    "lengths": lengths,
    "biased": biased,
    "numbered": numbered,
    "sized": sized,
    "looked up": looked_up,
    "map": mapped,
    "region": lambda net, y: net.again(net.again(y)),
    "vmap": lambda net, y, n: (
        y * torch.vmap(lambda i: (i > 3).float())(n)[:, None, None]
    ),
}
TAKES, MEET = (
    ("masked", "lengths", "looked up", "vmap"),
    ("numbered", "sized", "looked up"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_operations_that_are_given_graphs_are_eagers(name: str) -> None:
    torch.manual_seed(0)
    model = Net(GRAPHS[name])
    inputs = [torch.randn(8, 6, 8), *[torch.randint(1, 6, (8,))] * (name in TAKES)]
    eager = copy.deepcopy(model)
    with fxsched.backend(SCHEDULES["1f1b"](), profile=True) as backend:
        step = torch.compile(model, backend=backend)
        assert_trained(step, model, eager, *inputs)
        joint = any(event.job.joint for event in backend.timeline)
        assert joint is (name in MEET)


@pytest.mark.slow
def test_rows_are_apart_where_that_is_said() -> None:
    model, x = Net(lambda net, y: scaled(y)), torch.randn(8, 8)
    schedule = schedules.gpipe(2, 4)
    text = fxsched.explain(model, schedule, x)
    assert "may meet in scaled" in text and "fxsched.placements" in text
    fxsched.placements("placed::scaled", forward={(Shard(-1), Replicate()): Shard(-1)})
    text = " ".join(fxsched.explain(model, schedule, x).split())
    assert "meet in placed.scaled.default" in text
    assert "rows of the batch are mixed" in text
    fxsched.placements("placed::scaled", forward=ROWS)
    assert "meet" not in fxsched.explain(model, schedule, x)
    fxsched.placements(scaled, forward=ROWS, backward={Shard(0): (Shard(0), Partial())})
    assert "meet" not in fxsched.explain(model, schedule, x)


@pytest.mark.slow
def test_what_is_said_too_much_is_found_by_verify() -> None:
    model, x = Net(lambda net, y: scaled(y)), torch.randn(8, 8)
    fxsched.placements(scaled, forward=ROWS)
    found = fxsched.verify(model, schedules.gpipe(2, 4), x)
    assert not found.passed and "scaled" in found.why
    fxsched.placements(scaled, forward=ROWS, backward={})
    found = fxsched.verify(model, schedules.gpipe(2, 4), x)
    assert found.passed, found


def test_a_call_counts_as_many_operations_as_is_said() -> None:
    formula: Callable[..., int] = lambda q, k, v: 7 * q[0] * k[1]  # noqa: E731
    fxsched.placements(torch.ops.placed.attention_backward, flops=lambda *shapes: 5)
    for _ in range(2):  # the last holds
        fxsched.placements(attention, flops=formula)
    q, k = torch.randn(2, 4, 5, 3, requires_grad=True), torch.randn(2, 2, 5, 3)
    with FlopCounterMode(display=False) as counter:
        attention(q, k, k).sum().backward()
    assert counter.get_total_flops() == 7 * 2 * 2 + 5
    assert not {attention._opoverload, attention_backward._opoverload} & DECLARED.keys()


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({}, r"give forward="),
        ({"backward": ROWS}, r"give forward="),
        ({"forward": [ROWS]}, r"forward=\): give placements of outputs by those"),
        ({"forward": {Shard(0): Shard(0)}}, r"has 1 placements for the 2 tensors x, w"),
        ({"forward": {(0, Replicate()): Shard(0)}}, r"0 is no placement; give Shard"),
        ({"forward": {(Partial("max"),) * 2: Shard(0)}}, r"is no placement"),
        ({"forward": ROWS, "backward": ROWS}, r"has 2 placements for the 1 tensors"),
        ({"flops": 3}, r"flops=3\): give a function"),
    ],
)
def test_what_cannot_be_said_is_an_error(said: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=r"placements\(placed.scaled.default" + ".*"):
        fxsched.placements(scaled, **said)
    with pytest.raises(PlanError, match=text):
        fxsched.placements(scaled, **said)


def test_a_dimension_that_a_tensor_lacks_is_an_error() -> None:
    fxsched.placements(scaled, forward={(Shard(4), Replicate()): Shard(0)})
    model = Net(lambda net, y: scaled(y))
    with pytest.raises(PlanError, match=r"has Shard\(..\) of more dimensions than"):
        fxsched.plan(model, schedules.gpipe(2, 4), torch.randn(8, 8))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("triton_kernel_wrapper_mutation", "a Triton kernel.*triton_op.*placements"),
        ("out_dtype", "higher_order.out_dtype.*custom_op.*placements"),
        ("while_loop", "torch.while_loop.*a loop of a fixed number of steps"),
    ],
)
def test_others_are_refused_in_a_line(name: str, text: str) -> None:
    target: Any = getattr(torch.ops.higher_order, name)
    graph = fx.Graph()
    graph.call_function(target, ())
    graph.output(())
    error = refusal(fx.GraphModule({}, graph))
    assert error is not None
    assert text.split(".*")[-1] in str(error) and text.split(".*")[0] in str(error)
