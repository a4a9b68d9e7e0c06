"""Sums of gradients that the transport adds up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxsched
from fxsched import CheckError, PlanError, Schedule, schedules
from fxsched.accounts.traffic import sent_between
from fxsched.ir import ops
from fxsched.ir.graphs import Spec
from fxsched.ir.meta import of_call
from fxsched.ir.step import Message
from fxsched.transport.wire_format import LARGE, AllReduce


class Net(nn.Sequential):
    """With a weight whose gradient is transposed, and one of another type."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(*(nn.Linear(160, 160) for _ in range(4)))
        self.table = nn.Parameter(torch.randn(8, 160))
        self.double()
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(super().forward(x), self.table)
        return (y * self.scale).square().mean()


X = torch.randn(12, 160, generator=torch.Generator().manual_seed(1)).double()
SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "ddp, 2 workers": lambda: schedules.ddp(2, 2),
    "ddp, 3 workers": lambda: schedules.ddp(3, 6),
    "ddp, 4 workers": lambda: schedules.ddp(4, 4),
    "hsdp": lambda: schedules.hsdp(4, 2, 4),
}


def trained(schedule: Schedule, **options: Any) -> tuple[list[Any], fxsched.Plan]:
    """Gradients of a step, and its plan."""
    torch._dynamo.reset()
    model = Net()
    with fxsched.backend(schedule, **{"transport": "strict"} | options) as backend:
        torch.compile(model, backend=backend)(X).backward()
        plan = backend.plan
    return [each.grad for each in model.parameters()], plan


def sums(program: fx.GraphModule) -> list[fx.Node]:
    """The sums of a program."""
    found = program.graph.find_nodes(op="call_function", target=ops.all_reduce)
    return list(found)


@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_equal_eager(name: str) -> None:
    found, plan = trained(SCHEDULES[name]())
    eager = Net()
    eager(X).backward()
    for one, parameter in zip(found, eager.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad)
    assert all(sums(program) for program in plan.programs)
    assert not any(
        of.target in (ops.join, ops.piece)
        for program in plan.programs
        for of in program.graph.nodes
    )


@pytest.mark.parametrize("workers", [2, 4])
def test_bytes_are_those_of_a_ring(workers: int) -> None:
    _, plan = trained(schedules.ddp(workers, workers))
    whole = sum(each.nbytes for each in Net().parameters())
    sent = sent_between(plan.step)
    ring = {(w, (w + 1) % workers) for w in range(workers)}
    assert {pair for pair, size in sent.items() if size > 100} == ring
    wanted = 2 * (workers - 1) * whole / workers
    assert all(abs(sent[pair] - wanted) < 16 * workers for pair in ring)


def test_owners_of_groups_add_up_what_their_groups_give() -> None:
    """With hsdp each stage has an owner in each group, which has its group's first."""
    _, plan = trained(schedules.hsdp(4, 2, 4))
    for line in plan.lines:
        if isinstance(line, Message) and line.among:
            assert len(line.among) == 2
            assert {worker // 2 for worker in line.among} == {0, 1}


def test_the_update_reads_the_sum() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = {"transport": "strict", "optimizer": optimizer, "clip_grad_norm": 0.5}
    with fxsched.backend(schedules.ddp(2, 4), **options) as backend:
        torch.compile(model, backend=backend)(X[:8])
        assert all(map(sums, backend.plan.programs))
    eager = Net()
    eager(X[:8]).backward()
    nn.utils.clip_grad_norm_(eager.parameters(), 0.5)
    torch.optim.SGD(eager.parameters(), 0.1).step()
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def _tag(node: fx.Node, other: fx.Node) -> None:
    node.args, other.args = (
        (node.args[0], *other.args[1:]),
        (other.args[0], *node.args[1:]),
    )


def _place(node: fx.Node, other: fx.Node) -> None:
    node.args = (node.args[0], 1 - node.args[1], *node.args[2:])  # type: ignore[operator]


def _own(node: fx.Node, other: fx.Node) -> None:
    other.args = (node.args[0], *other.args[1:])


def _order(node: fx.Node, other: fx.Node) -> None:
    other.prepend(node) if node > other else other.append(node)


def _nobody(node: fx.Node, other: fx.Node) -> None:
    node.args = (*node.args[:2], ())


@pytest.mark.parametrize("fault", [_tag, _place, _own, _order, _nobody])
def test_the_proof_finds_a_wrong_sum(
    fault: Callable[[fx.Node, fx.Node], None],
) -> None:
    def wrong(program: fx.GraphModule, request: object) -> fx.GraphModule:
        own = {node.meta["worker"] for node in program.graph.nodes if "n" in node.meta}
        if own == {1}:
            fault(*_alike(sums(program)))
            program.recompile()
        return program

    with pytest.raises(CheckError):
        trained(schedules.ddp(2, 2), passes=[wrong], stages=["1", "2", "3"])


def _alike(found: Sequence[fx.Node]) -> tuple[fx.Node, fx.Node]:
    """Two sums of one shape."""
    return next(
        (one, other)
        for one, other in combinations(found, 2)
        if of_call(one)["specs"] == of_call(other)["specs"]
    )


def spec(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Spec:
    return Spec(tuple(shape), tuple(stride), dtype, torch.device("cpu"))


def test_small_tensors_of_a_type_are_added_up_as_one() -> None:
    wide = LARGE // 4
    specs = (
        spec((3, 2), (1, 3), torch.float32),
        spec((wide,), (1,), torch.float32),
        spec((2,), (1,), torch.bfloat16),
        spec((0, 4), (4, 1), torch.float32),
        spec((), (), torch.float32),
    )
    values = [
        torch.randn(each.shape).to(each.dtype).as_strided(each.shape, each.stride)
        if each.shape != (3, 2)
        else torch.randn(2, 3).T
        for each in specs
    ]
    parcel = AllReduce((0, 1), 7, specs)
    buffers = parcel.buffers(values)
    assert [each.numel() for each in buffers] == [wide, 7, 2]
    assert buffers[0].data_ptr() == values[1].data_ptr()
    for one, other, each in zip(parcel.value(buffers), values, specs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert one.shape == each.shape
        assert one.stride() == other.stride()


def test_collectives_are_refused_where_there_is_none() -> None:
    with pytest.raises(PlanError, match="only transport='nccl' has one"):
        trained(schedules.ddp(2, 2), transport="threads", sums="collective")
    with pytest.raises(PlanError, match="deterministic=True"):
        trained(schedules.ddp(2, 2), deterministic=True, sums="collective")
    with pytest.raises(PlanError, match="adds up gradients as they are"):
        encode = {"gradients": torch.bfloat16}
        trained(schedules.ddp(2, 2), encode=encode, sums="collective")
    _, plan = trained(schedules.ddp(2, 2), deterministic=True)
    assert not any(map(sums, plan.programs))
    _, plan = trained(schedules.ddp(2, 2), sums="pieces")
    assert not any(map(sums, plan.programs))
