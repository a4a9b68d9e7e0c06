"""encode= of weights and of their gradients equals eager PyTorch that rounds the same;
and how values are encoded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import fxsched
from fxsched import CheckError, PlanError, ops, schedules
from fxsched.ir import encodings, pieces
from fxsched.ir.graphs import Spec
from fxsched.ir.moved import Moved, moved
from fxsched.ir.step import Message
from fxsched.jobs.job import Direction, Job
from tests.passes.test_sums_in_pieces import STAGES, TWO_HOSTS, Net, X

TYPES = (torch.bfloat16, torch.int8)
Values = list[Tensor]


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A value that has travelled, in elements of its blocks."""
    if dtype is not torch.int8:
        return value.to(dtype).to(value.dtype)
    blocks = []
    for block in torch.split(value.detach().reshape(-1), 256):
        scale = max(abs(x) for x in block.tolist()) / 127 or 1.0
        blocks.append(torch.tensor([round(x / scale) * scale for x in block.tolist()]))
    return torch.cat(blocks).view(value.shape)


def stepped(**options: Any) -> tuple[fxsched.Plan, Values]:
    """The plan and the gradients of a step."""
    model, schedule = Net(), options.pop("schedule")
    with fxsched.backend(schedule, STAGES, **options) as backend:
        torch.compile(model, backend=backend)(X).backward()
        assert backend.plan is not None
        backend.plan.check()
        return backend.plan, [p.grad for p in model.parameters() if p.grad is not None]


def gradients(rounds: Callable[[int, int, Tensor], Tensor]) -> list[Values]:
    """Eager's for each microbatch, where its stages have rounded weights."""
    model, found = Net(), []
    for b, rows in enumerate(X.chunk(4)):
        read = {
            name: rounds(int(name.split(".")[1]), b, value.detach()).requires_grad_()
            for name, value in model.named_parameters()
        }
        loss = functional_call(model, read, rows) / 4
        found.append(list(torch.autograd.grad(loss, list(read.values()))))
    return found


@pytest.mark.parametrize("dtype", TYPES)
def test_jobs_read_fetched_weights_rounded(dtype: torch.dtype) -> None:
    schedule = schedules.fsdp(2, 4)

    def as_read(stage: int, b: int, value: Tensor) -> Tensor:
        place = schedule.place(Job(stage, b, Direction.FORWARD))
        away = place.weights != place.compute and value.dim() > 0
        return rounded(value, dtype) if away else value.clone()

    plan, found = stepped(schedule=schedule, encode={"weights": dtype})
    each = gradients(as_read)
    assert "encode= rounds what workers send: weights, " in plan.explain()
    for mine, *others in zip(found, *each, strict=True):
        torch.testing.assert_close(mine, sum(others[1:], others[0]))
    assert sent(plan, Moved.WEIGHTS) < sent_as_is(schedule, Moved.WEIGHTS) / (
        1.95 if dtype is torch.bfloat16 else 3.9
    )


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sums", ["messages", "pieces"])
def test_sums_of_gradients_are_rounded_on_their_way(
    sums: str, dtype: torch.dtype
) -> None:
    schedule = schedules.ddp(2, 4)
    options: dict[str, Any] = {"sums": sums, "encode": {"gradients": dtype}}
    plan, found = stepped(schedule=schedule, **options)
    each, own = gradients(lambda s, b, value: value.clone()), list[Values]()
    for worker in range(2):
        places = (schedule.place(Job(0, b, Direction.FORWARD)) for b in range(4))
        mine = [g for g, at in zip(each, places, strict=True) if at.compute == worker]
        own.append([sum(values[1:], values[0]) for values in zip(*mine, strict=True)])
    names = [name for name, _ in Net().named_parameters()]
    for number, group in enumerate(plan.step.facts.groups):
        at = [names.index(name) for name in group.names]
        parts = [tuple(values[i] for i in at) for values in own]
        wanted = (
            in_pieces(parts, dtype)
            if sums == "pieces"
            else at_root(parts, number % 2, dtype)
        )
        for i, value in zip(at, wanted, strict=True):
            assert_close(found[i], value)
    assert sent(plan, Moved.GRADIENTS) < sent_as_is(schedule, Moved.GRADIENTS) / (
        1.95 if dtype is torch.bfloat16 else 3.8
    )


def assert_close(mine: Tensor, wanted: Tensor) -> None:
    """Equal to float tolerance, aside from ties that are rounded the other way."""
    step = wanted.abs().max() / 100
    torch.testing.assert_close(mine, wanted, rtol=0, atol=float(step))
    other = ~torch.isclose(mine, wanted, rtol=1e-4, atol=1e-6)
    assert other.sum() <= 3


def at_root(
    parts: list[tuple[Tensor, ...]], root: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """The root adds up, and sends all owners the sum."""
    pairs = zip(parts[root], parts[1 - root], strict=True)
    return tuple(rounded(own + rounded(other, dtype), dtype) for own, other in pairs)


def in_pieces(
    parts: list[tuple[Tensor, ...]], dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Each adds up a piece, and sends it to the other."""
    layout = pieces.layout_of(tuple(map(Spec.of, parts[0])))
    summed = [
        at_root([pieces.piece(i, 2, layout, part) for part in parts], i, dtype)
        for i in range(2)
    ]
    return pieces.join(layout, *summed)


def sent(plan: fxsched.Plan, kind: Moved) -> int:
    return sum(
        line.bytes
        for line in plan.lines
        if isinstance(line, Message) and moved(plan.step, line.value) is kind
    )


def sent_as_is(schedule: fxsched.Schedule, kind: Moved) -> int:
    return sent(fxsched.plan(Net(), schedule, X, stages=STAGES), kind)


@pytest.mark.parametrize("name", ["ddp", "hsdp", "fsdp"])
def test_hosts_hand_on_what_is_encoded(name: str) -> None:
    schedule = {
        "ddp": schedules.ddp(4, 8),
        "hsdp": schedules.hsdp(4, 2, 8),
        "fsdp": schedules.fsdp(4, 8),
    }[name]
    every = dict.fromkeys(("weights", "gradients"), torch.bfloat16)
    _, found = stepped(schedule=schedule, network=TWO_HOSTS, encode=every)
    model = Net()
    model(X).backward()
    for mine, other in zip(found, model.parameters(), strict=True):
        assert other.grad is not None
        error = (mine - other.grad).norm() / other.grad.norm()
        assert 0 < error < 0.05


def test_updates_that_wait_for_nobody_take_rounded_gradients() -> None:
    """A parameter server's steps, in a fixed order and in order of arrival."""
    for order in ("static", "dynamic"):
        model = Net()
        start = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = schedules.parameter_server(3, 4, asynchronous=True)
        options: Any = {"order": order, "optimizer": optimizer}
        every = dict.fromkeys(("weights", "gradients"), torch.int8)
        with fxsched.backend(schedule, encode=every, **options) as backend:
            step = torch.compile(model, backend=backend)
            first = step(X).item()
            for _ in range(3):
                last = step(X).item()
        assert last < first
        assert not any(map(torch.equal, start, model.parameters()))


# The proof


def _own(graph: torch.fx.Graph) -> tuple[torch.fx.Node, torch.fx.Node]:
    """What a worker decodes of its own, and what it encoded."""
    for node in graph.find_nodes(op="call_function", target=ops.decode):
        (travels,) = node.all_input_nodes
        if travels.target is ops.encode:
            return node, travels
    raise AssertionError("a piece is sent to all owners")


def _reads_exact(graph: torch.fx.Graph) -> None:
    decoded, encoded = _own(graph)
    (exact,) = encoded.all_input_nodes
    for user in list(exact.users):
        if user.target is ops.free:
            user.args = tuple(a for a in user.args if a is not exact)
    decoded.replace_all_uses_with(exact)
    graph.erase_node(decoded)


def _another_type(graph: torch.fx.Graph) -> None:
    decoded, _ = _own(graph)
    codes: Any = decoded.args[0]
    travels = decoded.args[1]
    wrong = tuple((torch.float16, *code[1:]) for code in codes)
    decoded.args = (wrong, travels)


def _another_value(graph: torch.fx.Graph) -> None:
    first, second, *_ = graph.find_nodes(op="call_function", target=ops.encode)
    first.args, second.args = second.args, first.args


@pytest.mark.parametrize("mutant", [_reads_exact, _another_type, _another_value])
def test_the_proof_finds_wrong_encodings(mutant: Any) -> None:
    options: Any = {"sums": "pieces", "encode": {"gradients": torch.bfloat16}}
    plan = fxsched.plan(Net(), schedules.ddp(2, 4), X, stages=STAGES, **options)
    plan.check()
    mutant(plan.programs[0].graph)
    with pytest.raises(CheckError):
        dataclasses.replace(plan, programs=plan.programs).check()


# How values are encoded


def test_int8_rounds_to_a_step_of_each_block() -> None:
    torch.manual_seed(0)
    value = torch.randn(7, 100, 3).permute(2, 0, 1)  # its memory in another order
    tiny, zeros = torch.randn(1), torch.zeros(300)
    values = (value, tiny, zeros, torch.arange(300))
    specs = tuple(map(Spec.of, values))
    codes = encodings.codes_of(specs, torch.int8)
    assert codes is not None and [code is None for code in codes] == [0, 1, 0, 1]
    travels = encodings.encode(codes, values)
    assert tuple(map(Spec.of, travels)) == encodings.encoded_specs(codes, specs)
    back = encodings.decode(codes, travels)
    assert tuple(map(Spec.of, back)) == specs
    memory = value.permute(1, 2, 0)
    wanted = rounded(memory, torch.int8).permute(2, 0, 1)
    torch.testing.assert_close(back[0], wanted)
    assert back[1] is tiny and torch.equal(back[2], zeros)


@pytest.mark.parametrize("wrong", [torch.inf, torch.nan])
def test_a_block_with_nan_or_inf_comes_back_as_nan(wrong: float) -> None:
    value = torch.ones(600)
    value[300] = wrong
    codes = encodings.codes_of((Spec.of(value),), torch.int8)
    assert codes is not None
    back = encodings.decode_one(codes, encodings.encode(codes, value))
    assert torch.equal(back.isnan(), (torch.arange(600) // 256) == 1)


def test_averages_of_replicas_have_no_sums_to_round() -> None:
    with pytest.raises(PlanError, match="averages replicas, and sends no gradients"):
        fxsched.backend(schedules.local_sgd(2, 4), encode={"gradients": torch.int8})
