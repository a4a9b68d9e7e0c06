"""The Python that a program becomes, and that it lets go of values in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import fxsched
from fxsched import schedules
from fxsched.ir import ops
from fxsched.runtime.python_source import let_go
from fxsched.runtime.static_program import Straight
from fxsched.runtime.tasks import TaskProgram, sent
from tests.passes.test_passes import plan_of


class Squared(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


@pytest.mark.parametrize("schedule", ["shifted", "zb_h1"])
def test_source_of(schedule: str, golden: Callable[[str, str], None]) -> None:
    for rank in (0, 1):
        straight = Straight(TaskProgram(plan_of(schedule).programs[rank]), record=True)
        lines = let_go(straight.source.lines)
        assert straight.tasks == [task for _, task in lines]
        text = "\n".join(f"{task:<9} {line}" for line, task in lines)
        golden(f"source_{schedule}_{rank}", text)


def test_sums_for_the_user_are_sent_to_be_kept() -> None:
    plan = fxsched.plan(nn.Linear(4, 4), schedules.ddp(2), torch.ones(4, 4))
    kept, other = [], []
    for program in plan.programs:
        for node in program.graph.find_nodes(op="call_function", target=ops.send):
            (kept if sent(node).outlives_step else other).append(str(node.args[0]))
    assert kept == ["gradients_0"] and "gradients_0" not in other and other


def test_losses_of_microbatches_are_kept_in_one_tensor() -> None:
    """But not of those that other workers send, which no line of this worker makes."""
    x = torch.ones(8, 4)
    plan = fxsched.plan(Squared(), schedules.gpipe(1, 4), x)
    (program,) = plan.programs

    def lines() -> str:
        straight = Straight(TaskProgram(program), record=False)
        return "\n".join(text for text, _ in straight.source.lines)

    text = lines()
    assert text.count("= empty(4, ") == 1 and text.count(".copy_(") == 4
    bundle = next(n for n in program.graph.nodes if n.target is ops.bundle)
    recv = program.graph.create_node(
        "call_function", ops.recv, (), {"source": 1, "tag": 9}
    )
    recv.meta = {**bundle.args[0].meta, "bundle": False}
    bundle.args = (recv, *bundle.args[1:])
    bundle.prepend(recv)
    assert ".copy_(" not in lines()


def test_a_variable_is_let_go_after_its_last_use() -> None:
    lines = [("v1 = f()", ""), ("v2 = g(v1)", ""), ("h(v1, v2)", ""), ("v3 = f()", "")]
    assert [text for text, _ in let_go(lines)] == [
        "v1 = f()",
        "v2 = g(v1)",
        "h(v1, v2); v1 = v2 = None",
        "v3 = f(); v3 = None",
    ]


def test_a_stage_of_the_users_own_is_called_as_it_is() -> None:
    """A pass may put any module in a stage's place."""
    calls = []

    class Own(nn.Module):
        def __init__(self, stage: nn.Module) -> None:
            super().__init__()
            self.stage = stage

        def forward(self, *args: Any) -> Any:
            calls.append(len(args))
            return self.stage(*args)

    def wrap(program: fx.GraphModule, request: object) -> fx.GraphModule:
        for name, stage in list(program.named_children()):
            setattr(program, name, Own(stage))
        for call in program.graph.find_nodes(op="call_module"):
            fxsched.passes.replaces(call)
        return program

    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(4, 4)
    backend = fxsched.backend(schedules.gpipe(1, 2), passes=[wrap], transport="threads")
    out = torch.compile(model, backend=backend)(x)
    torch.testing.assert_close(out, model(x))
    assert calls == [3, 3]


@pytest.mark.parametrize("order", ["static", "dynamic"])
def test_a_pass_of_the_users_may_read_gradients_before_they_are_summed(
    order: str,
) -> None:
    seen: list[torch.Tensor] = []

    def note(gradients: tuple[torch.Tensor, ...]) -> None:
        seen.extend(g.clone() for g in gradients)

    def read(program: fx.GraphModule, request: object) -> fx.GraphModule:
        sums = program.graph.find_nodes(op="call_function", target=ops.accumulate)
        for total in sums:
            with program.graph.inserting_before(total):
                new = program.graph.call_function(note, (total.args[1],))
                new.meta.update(total.meta, specs=())
                free = program.graph.call_function(ops.free, (new,))
                free.meta.update(new.meta)
        program.recompile()
        return program

    model, x = nn.Linear(4, 1, bias=False), torch.randn(4, 4)
    backend = fxsched.backend(
        schedules.gpipe(1, 2), passes=[read], transport="threads", order=order
    )
    torch.compile(model, backend=backend)(x).sum().backward()
    (second,) = seen
    torch.testing.assert_close(second, x[2:].sum(0, keepdim=True))
    torch.testing.assert_close(model.weight.grad, x.sum(0, keepdim=True))
