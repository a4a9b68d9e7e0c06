"""Passes of the user's: what they may change, and what happens when they break it."""

from __future__ import annotations

import copy
import enum
import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxsched
from fxsched import CheckError, PlanError, ops, schedules
from fxsched.passes import replaces, stage_graphs
from tests.text import graph_text


def narrow(x: Tensor) -> Tensor:
    return x.bfloat16() if x.dtype is torch.float32 else x


def bf16_sends(program: fx.GraphModule, request: object) -> fx.GraphModule:
    """With nothing but torch.fx: no meta but the type of what is received."""
    graph = program.graph
    for send in graph.find_nodes(op="call_function", target=ops.send):
        (value,) = send.all_input_nodes
        with graph.inserting_before(send):
            send.args = (graph.call_function(narrow, (value,)),)
        replaces(send.args[0], value)
    for recv in graph.find_nodes(op="call_function", target=ops.recv):
        with graph.inserting_before(min(recv.users)):
            wide = graph.call_method("float", (recv,))
        recv.replace_all_uses_with(wide, lambda user, wide=wide: user is not wide)
        replaces(wide, recv)
        (spec,) = recv.meta["specs"]
        recv.meta["specs"] = (spec._replace(dtype=torch.bfloat16),)
    return program


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh()).pow(2).mean()


def planned(*passes: Any) -> fxsched.Plan:
    return fxsched.plan(
        Chain(), schedules.gpipe(2, 2), torch.ones(4, 3), stages=["b"], passes=passes
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_preview_shows_places_and_frees(rank: int, golden: Any) -> None:
    golden(f"bf16_sends_{rank}", graph_text(planned(bf16_sends).programs[rank]))


def test_nodes_without_facts_take_those_of_their_neighbours() -> None:
    for program in planned(bf16_sends).programs:
        for node in program.graph.find_nodes(op="call_method"):
            reader = next(iter(node.users))
            if reader.op != "output":
                assert node.meta["task"] == reader.meta["task"]


@pytest.mark.parametrize("order", ["static", "dynamic"])
def test_a_pass_that_narrows_sends_trains_as_eager_to_bf16(order: str) -> None:
    model, x = Chain(), torch.randn(4, 3)
    reference = copy.deepcopy(model)
    reference(x).backward()
    backend = fxsched.backend(
        schedules.gpipe(2, 2), ["b"], passes=[bf16_sends], order=order
    )
    with backend:
        torch.compile(model, backend=backend)(x).backward()
    for own, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        assert not torch.equal(own.grad, wanted.grad)
        torch.testing.assert_close(own.grad, wanted.grad, rtol=2e-2, atol=2e-2)


def test_what_a_pass_replaces_without_a_word_is_refused() -> None:
    def negated(program: fx.GraphModule, request: object, says: bool) -> fx.GraphModule:
        for send in program.graph.find_nodes(op="call_function", target=ops.send):
            (value,) = send.all_input_nodes
            with program.graph.inserting_before(send):
                new = program.graph.call_function(torch.neg, (value,))
            if says:
                fxsched.passes.replaces(new, value)
            send.args = (new,)
        return program

    with pytest.raises(
        CheckError, match=r"reads recv_\d, which is torch.neg\(result 0 of \d[FB]\d\)"
    ):
        planned(functools.partial(negated, says=False)).check()
    plan = planned(functools.partial(negated, says=True))
    plan.check()
    assert plan.replaced == ("passes replace values: 5 by neg",)
    assert "passes replace values: 5 by neg" in plan.explain()


def test_stages_that_a_pass_replaces_are_printed() -> None:
    def doubled(program: fx.GraphModule, request: object) -> fx.GraphModule:
        for name, flat in fxsched.passes.stage_graphs(program):
            for node in flat.graph.nodes if name.startswith("forward_1") else ():
                if node.op == "output":
                    first = node.args[0][0]
                    with flat.graph.inserting_before(node):
                        twice = flat.graph.call_function(torch.mul, (first, 2))
                    node.replace_input_with(first, twice)
        return program

    plan = planned(doubled)
    plan.check()
    assert plan.replaced == ("passes replace stages: forward_1",)


class Color(enum.StrEnum):
    RED = "red"


def test_any_constant_may_be_an_argument() -> None:
    given: list[Any] = []
    constants: list[Any] = [
        math.inf, -math.inf, math.nan, Color.RED, "v1", {"x": 1e300 * 10}, slice(1, 2),
        torch.float32, None, True,
    ]  # fmt: skip

    def note(value: Tensor, *args: Any, **kwargs: Any) -> None:
        given.extend([*args, kwargs])

    def insert(program: fx.GraphModule, request: object) -> fx.GraphModule:
        send = next(iter(program.graph.find_nodes(op="call_function", target=ops.send)))
        with program.graph.inserting_before(send):
            args = (send.args[0], *constants)
            program.graph.call_function(note, args, {"scale": math.inf})
        return program

    text = str(planned(insert)) + planned(insert).programs[0].code
    assert "inf" in text
    backend = fxsched.backend(schedules.gpipe(2, 2), ["b"], passes=[insert])
    with backend:
        torch.compile(Chain(), backend=backend)(torch.ones(4, 3))
    backend.plan.check()
    assert repr(given[: len(constants) + 1]) == repr([*constants, {"scale": math.inf}])
    assert given[3] is Color.RED


@pytest.mark.slow
def test_stage_graphs_are_walked_once_and_changed_alone() -> None:
    def double(program: fx.GraphModule, request: object) -> fx.GraphModule:
        for name, graph in stage_graphs(program):
            if name.endswith("flat_forward"):
                for node in graph.graph.find_nodes(
                    op="call_function", target=torch.ops.aten.tanh.default
                ):
                    node.target = torch.ops.aten.relu.default
        return program

    model, x = Chain(), torch.randn(4, 3)
    with torch.no_grad():
        wanted = model.b(model.a(x).relu()).pow(2).mean()
        plain = model(x)
        for passes, value in (([double], wanted), ([], plain)):
            backend = fxsched.backend(schedules.gpipe(2, 2), ["b"], passes=passes)
            with backend:
                found = torch.compile(model, backend=backend)(x)
            torch.testing.assert_close(found, value)
    names = [n for p in planned().programs for n, _ in stage_graphs(p)]
    assert names == [
        "forward_0.flat_forward",
        "backward_0.flat_backward",
        "forward_1.flat_forward",
        "backward_1.flat_backward",
    ]


def returns_nothing(program: fx.GraphModule, request: object) -> None:
    return None


def moves_a_send(program: fx.GraphModule, request: object) -> fx.GraphModule:
    send = next(iter(program.graph.find_nodes(op="call_function", target=ops.send)))
    send.args[0].prepend(send)
    return program


def sends_a_number(program: fx.GraphModule, request: object) -> fx.GraphModule:
    for send in program.graph.find_nodes(op="call_function", target=ops.send):
        with program.graph.inserting_before(send):
            send.args = (program.graph.call_function(torch.nonzero, send.args),)
    return program


def narrows_one_end(program: fx.GraphModule, request: object) -> fx.GraphModule:
    for send in program.graph.find_nodes(op="call_function", target=ops.send):
        with program.graph.inserting_before(send):
            send.args = (program.graph.call_function(narrow, send.args),)
    return program


def fails(program: fx.GraphModule, request: object) -> fx.GraphModule:
    raise ZeroDivisionError("here")


@pytest.mark.parametrize(
    ("broken", "error", "said"),
    [
        (returns_nothing, PlanError, r"returns_nothing returned None for worker 0; .*"),
        (moves_a_send, PlanError, r"moves_a_send breaks the program of worker \d: .*"),
        (sends_a_number, PlanError, r"worker \d: nonzero of 0F0, .*node.meta\['specs'"),
        (narrows_one_end, CheckError, r"sends bfloat16\[2, 3\], but .* expects float"),
        (fails, ZeroDivisionError, "here"),
    ],
)
def test_a_broken_pass_is_named(broken: Any, error: type, said: str) -> None:
    backend = fxsched.backend(schedules.gpipe(2, 2), ["b"], passes=[broken])
    with backend, pytest.raises(error, match=said) as caught:
        torch.compile(Chain(), backend=backend)(torch.ones(4, 3))
    notes = " ".join(getattr(caught.value, "__notes__", ()))
    assert broken.__name__ in f"{caught.value} {notes}" or error is PlanError
