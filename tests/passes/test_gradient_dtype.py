"""gradient_dtype=: gradients are added up in a type of their own, and cast once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxsched
from fxsched import CheckError, PlanError, Schedule, schedules
from fxsched.ir import ops
from tests import ranks_gradient_dtype as cases
from tests.program_memory import most_held
from tests.started_ranks import run_ranks

WAYS = {
    "ddp": (schedules.ddp(2, 8), torch.float32, "static"),
    "zb_h1": (schedules.zb_h1(2, 8), torch.float16, "dynamic"),
    "zero2": (schedules.zero2(2, 8), torch.float32, "dynamic"),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_sums_are_cast_once(way: str) -> None:
    schedule, dtype, order = WAYS[way]
    cases.compare(schedule, dtype, order=order)


@pytest.mark.slow
def test_ranks_have_the_bits_of_one_process() -> None:
    done = run_ranks(2, "tests.ranks_gradient_dtype")
    assert done.stdout.count("have the bits of one process") == 1


@pytest.mark.slow
def test_updates_in_the_program_get_the_finished_sum() -> None:
    model, x, y = cases.model()
    eager = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), 0.5) for each in (model, eager)]
    torch._dynamo.reset()
    backend = fxsched.backend(
        schedules.zero2(2, 8),
        optimizer=optimizers[0],
        clip_grad_norm=0.1,
        gradient_dtype=torch.float32,
        deterministic=True,
    )
    with backend:
        torch.compile(model, backend=backend)(x, y)
        assert backend.plan is not None
    fxsched.replay(backend.plan, eager, optimizers[1], [(x, y)], clip_grad_norm=0.1)
    for found, wanted in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(found, wanted)


def plan(schedule: Schedule, tied: bool = True, **options: Any) -> fxsched.Plan:
    model, x, y = cases.model()
    model.get_submodule("embed").requires_grad_(tied)
    options = {"gradient_dtype": torch.float32, "stages": ["second"], **options}
    return fxsched.plan(model, schedule, x, y, **options)


@pytest.mark.slow
@pytest.mark.parametrize("in_order", [False, True])
def test_memory_counts_sums_in_their_type(in_order: bool) -> None:
    planned = plan(schedules.one_f_one_b(2, 4), not in_order, deterministic=in_order)
    for worker, program in enumerate(planned.programs):
        held = most_held(program)["gradients"]
        counted = planned.memory[worker].each.gradients
        assert held == counted


@pytest.mark.slow
def test_partial_sums_are_sent_in_their_type_and_finished_ones_in_the_weights() -> None:
    program = plan(schedules.ddp(2, 4), stages="auto").programs[0]
    types: dict[Any, set[torch.dtype]] = {ops.send: set(), ops.recv: set()}
    for node in program.graph.nodes:
        value = node.args[0] if node.target is ops.send else node
        if node.target in types and isinstance(value, fx.Node):
            bundle = value.meta["specs"] if value.meta["bundle"] else ()
            types[node.target] |= {spec.dtype for spec in bundle}
    sent = types[ops.send] | types[ops.recv]
    assert sent == {torch.float32, torch.bfloat16}


@pytest.mark.slow
def test_stages_count_sums_in_their_type() -> None:
    own, wide = (
        plan(schedules.ddp(2, 4), gradient_dtype=None),
        plan(schedules.ddp(2, 4)),
    )
    for stage in own.stages:
        before, after = own.stages.nodes[stage], wide.stages.nodes[stage]
        assert after["gradients"] == before["weights"]  # weights and gradients, 2 + 2
        assert after["weights"] == 1.5 * before["weights"]


def test_the_check_finds_a_sum_in_another_type() -> None:
    planned = plan(schedules.gpipe(2, 4))
    planned.check()
    graph = planned.programs[0].graph
    cast = graph.find_nodes(op="call_function", target=ops.cast)[0]
    total = cast.args[0]
    graph.output_node().replace_input_with(cast, total)
    for free in graph.find_nodes(op="call_function", target=ops.free):
        free.args = tuple(each for each in free.args if each is not total)
    free = graph.find_nodes(op="call_function", target=ops.free)[-1]
    free.args = (*free.args, cast)
    with pytest.raises(CheckError, match=r"it should be .* as torch\.bfloat16"):
        planned.check()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).abs().mean()


def test_what_has_no_sum_in_the_type_is_refused() -> None:
    for dtype in (torch.int32, torch.complex64, "float32"):
        with pytest.raises(PlanError, match=r"give one of torch\.float32"):
            fxsched.backend(schedules.gpipe(2, 4), gradient_dtype=dtype)
    one, x = schedules.gpipe(1, 4), torch.randn(8, 4)
    with pytest.raises(PlanError, match=r"weight is torch\.complex64"):
        fxsched.plan(Complex(), one, x, gradient_dtype=torch.float32)
