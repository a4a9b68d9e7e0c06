"""Sums of gradients that several workers want: each adds up a piece of it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import schedules
from fxsched.checker.summary import CheckError
from fxsched.ir import ops, pieces
from fxsched.ir.graphs import Spec
from fxsched.ir.moved import Moved, moved
from fxsched.ir.step import Message
from fxsched.jobs.job import PlanError
from fxsched.jobs.schedule import Schedule


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


STAGES = ["blocks.1", "blocks.2", "blocks.3"]
APART = fxsched.Network([[0], [1, 2], [3]], *2 * [fxsched.Rate(1e9)])
TWO_HOSTS = fxsched.Network([[0, 1], [2, 3]], *2 * [fxsched.Rate(1e9)])
X = torch.randn(16, 128, generator=torch.Generator().manual_seed(1))
SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "ddp": lambda: schedules.ddp(4, 8),
    "hsdp": lambda: schedules.hsdp(4, 2, 8),
    "1f1b": lambda: schedules.one_f_one_b(4, 8),
}


def _equal(schedule: Schedule, **options: object) -> fxsched.Plan:
    """The plan of a step whose loss and gradients are eager's."""
    model, eager = Net(), Net()
    backend = fxsched.backend(schedule, **options)  # type: ignore[arg-type]
    step = torch.compile(model, backend=backend)
    for _ in range(2):
        model.zero_grad()
        loss = step(X)
        loss.backward()
    wanted = eager(X)
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
        assert mine.grad is not None
        assert mine.grad.stride() == mine.stride()
    plan = backend.plan
    backend.close()
    return plan


def _calls(plan: fxsched.Plan, target: object) -> int:
    return sum(op.target is target for op in plan.step.ops)


@pytest.mark.parametrize("order", ["static", "dynamic"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_sums_in_pieces_equal_eager(name: str, order: str) -> None:
    plan = _equal(SCHEDULES[name](), sums="pieces", order=order)
    assert bool(_calls(plan, ops.join)) == (name != "1f1b")  # whose sums have one owner


@pytest.mark.parametrize("order", ["static", "dynamic"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_sums_inside_hosts_first_equal_eager(name: str, order: str) -> None:
    plan = _equal(SCHEDULES[name](), order=order, network=TWO_HOSTS)
    assert bool(_calls(plan, ops.join)) == (name != "1f1b")


@pytest.mark.parametrize("network", [APART, TWO_HOSTS])
@pytest.mark.parametrize("name", SCHEDULES)
def test_sums_that_go_from_host_to_host_equal_eager(
    name: str, network: fxsched.Network
) -> None:
    options = {"network": network, "sums": "ring", "stages": STAGES}
    plan = _equal(SCHEDULES[name](), **options)
    assert bool(_calls(plan, ops.join)) == (name != "1f1b")
    host = {w: h for h, own in enumerate(network.hosts) for w in own}
    ways = {
        (host[line.source], host[line.to])
        for line in plan.lines
        if isinstance(line, Message) and line.aside
    }
    if name == "ddp":  # all hosts give to each sum
        count = len(network.hosts)
        assert all(b in (a, (a + 1) % count) for a, b in ways)


def test_the_check_finds_a_ring_that_leaves_out_a_host() -> None:
    options = {"network": APART, "sums": "ring", "stages": STAGES}
    plan = fxsched.plan(Net(), schedules.ddp(4, 8), X, **options)
    plan.check()
    adds = [
        node
        for program in plan.programs
        for node in program.graph.nodes
        if node.target is ops.reduce and "up_to_host" in node.name
    ]
    place, first, second = adds[0].args
    adds[0].args = (place, first, first) if place == 0 else (place, second, second)
    with pytest.raises(CheckError):
        plan.check()


def test_updates_in_the_program_read_sums_in_pieces() -> None:
    def trained(**options: object) -> list[Tensor]:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = schedules.ddp(4, 8)
        backend = fxsched.backend(
            schedule, optimizer=optimizer, clip_grad_norm=0.1, **options
        )  # type: ignore[arg-type]
        step = torch.compile(model, backend=backend)
        for _ in range(3):
            step(X)
        backend.close()
        return [p.detach() for p in model.parameters()]

    for mine, other in zip(trained(sums="pieces"), trained(), strict=True):
        torch.testing.assert_close(mine, other)


def test_a_host_sends_each_gradient_once() -> None:
    """Its part of each sum, or the sum of its own pieces."""
    plan = fxsched.plan(Net(), schedules.ddp(4, 8), X, network=TWO_HOSTS)
    sent = sum(
        line.bytes
        for line in plan.lines
        if isinstance(line, Message) and (line.source < 2) != (line.to < 2)
        if line.source < 2
    )
    gradients = sum(p.numel() * 4 for p in Net().parameters())
    assert gradients <= sent <= 1.01 * gradients + 64  # the loss, too


def test_a_host_adds_up_what_it_gives_to_an_owner_elsewhere() -> None:
    fsdp, network = schedules.fsdp(4, 8), TWO_HOSTS
    plan = fxsched.plan(Net(), fsdp, X, stages=STAGES, network=network)
    sent = sum(
        line.bytes
        for line in plan.lines
        if isinstance(line, Message) and (line.source < 2) != (line.to < 2)
        if moved(plan.step, line.value) is Moved.GRADIENTS
    )
    assert sent == sum(p.numel() * 4 for p in Net().parameters())  # each once


def _mutants() -> dict[str, Callable[[torch.fx.Node], None]]:
    def swapped(node: torch.fx.Node) -> None:
        layout, first, second, *others = node.args
        node.args = (layout, second, first, *others)

    def twice(node: torch.fx.Node) -> None:
        layout, first, _, *others = node.args
        node.args = (layout, first, first, *others)

    def another_layout(node: torch.fx.Node) -> None:
        layout, *others = node.args
        node.args = (layout[::-1], *others)  # type: ignore[index]

    return {"swapped": swapped, "twice": twice, "another layout": another_layout}


@pytest.mark.parametrize("name", _mutants())
def test_the_check_finds_pieces_joined_wrongly(name: str) -> None:
    plan = fxsched.plan(Net(), schedules.ddp(4, 8), X, sums="pieces")
    plan.check()
    graph = plan.programs[1].graph
    node = next(n for n in graph.nodes if n.target is ops.join)
    _mutants()[name](node)
    with pytest.raises(CheckError):
        plan.check()


def test_the_check_finds_a_piece_read_after_another_sum_went_over_it() -> None:
    plan = fxsched.plan(Net(), schedules.ddp(4, 8), X, sums="pieces")
    graph = plan.programs[1].graph
    add = next(n for n in graph.nodes if n.target is ops.reduce)
    own = next(n for n in add.all_input_nodes if n.target is ops.piece)
    add.append(graph.node_copy(own))  # cut once more, from what is changed now
    with pytest.raises(CheckError):
        plan.check()


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_pieces_of_a_bundle_join_to_it(count: int) -> None:
    values = (torch.randn(3, 5), torch.randn(4, 2, 3).permute(2, 0, 1), torch.randn(7))
    specs = tuple(map(Spec.of, values))
    layout = pieces.layout_of(specs)
    cut = [pieces.piece(i, count, layout, values) for i in range(count)]
    for i, each in enumerate(cut):
        assert tuple(map(Spec.of, each)) == pieces.piece_specs(i, count, specs)
    sizes = [sum(t.numel() for t in each) for each in cut]
    assert max(sizes) - min(sizes) <= 1
    joined = pieces.join(layout, *cut)
    for one, other, spec in zip(joined, values, specs, strict=True):
        assert torch.equal(one, other)
        assert Spec.of(one) == spec


def test_an_error_in_a_sum_ends_the_step_and_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other workers, which wait for the piece, end too."""
    add = torch._foreach_add_

    def fails(*args: object) -> object:
        if threading.current_thread().name.startswith("fxsched waits"):
            raise RuntimeError("no room for a sum")
        return add(*args)

    backend = fxsched.backend(schedules.ddp(4, 8), sums="pieces")
    step = torch.compile(Net(), backend=backend)
    step(X).backward()
    monkeypatch.setattr(torch, "_foreach_add_", fails)
    with pytest.raises(RuntimeError, match="no room for a sum") as raised:
        step(X).backward()
    assert "add piece" in "".join(raised.value.__notes__)
    monkeypatch.undo()
    step(X).backward()
    backend.close()


def test_deterministic_excludes_pieces() -> None:
    with pytest.raises(PlanError, match=r"sums='pieces'.*deterministic"):
        fxsched.backend(schedules.ddp(2, 2), sums="pieces", deterministic=True)
