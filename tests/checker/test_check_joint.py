"""The verifier finds rows of a microbatch where another's belong."""

from __future__ import annotations

import functools
from dataclasses import replace
from operator import getitem

import pytest
import torch
from torch import Tensor, fx, nn

import fxsched
from fxsched import CheckError, Job, Plan


class Pairs(nn.Module):
    """Two encoders, and a loss over all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.a(x).tanh() @ self.b(y).tanh().T
        return logits.logsumexp(1).mean() - logits.diagonal().mean()


class Centred(nn.Module):
    """Microbatches read the mean of the whole batch as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x).tanh()
        return nn.functional.mse_loss(self.b(h - h.mean(0)), y)


@functools.cache
def planned(model: type[nn.Module] = Pairs, workers: int = 2) -> Plan:
    x, y = torch.ones(6, 3), torch.ones(6, 3)
    return fxsched.plan(model(), fxsched.schedules.one_f_one_b(workers, 3), x, y)


def copied(
    model: type[nn.Module] = Pairs, worker: int = 1, workers: int = 2
) -> tuple[Plan, fx.Graph]:
    """The plan with programs of its own, and the graph of a worker's: of worker 1's,
    which has the global-batch stage and the second encoder, or another."""
    programs = []
    for program in planned(model, workers).programs:
        graph = fx.Graph()
        graph.output(graph.graph_copy(program.graph, {}))
        programs.append(fx.GraphModule(program, graph))
    plan = replace(planned(model, workers), programs=tuple(programs))
    return plan, programs[worker].graph


def call(graph: fx.Graph, job: str) -> fx.Node:
    return next(n for n in graph.nodes if n.meta.get("job") == Job.parse(job))


@pytest.mark.slow
def test_a_plan_with_a_joint_stage_is_sound() -> None:
    plan, graph = copied()
    plan.check()
    assert str(call(graph, "2F*").meta["job"]) == "2F*"


@pytest.mark.parametrize("first", [0, 3])
def test_microbatches_in_another_order_are_found(first: int) -> None:
    """Of worker 0, whose values come with messages, and of worker 1 itself."""
    plan, graph = copied()
    node = call(graph, "2F*")
    read = list(node.args[1])
    assert len(read) == 6
    read[first], read[first + 1] = read[first + 1], read[first]
    node.update_arg(1, tuple(read))
    message = r"2F\* reads .* result 0 of \dF1; it should be result 0 of \dF0"
    with pytest.raises(CheckError, match=message):
        plan.check()


def test_a_microbatch_read_twice_is_found() -> None:
    plan, graph = copied()
    node = call(graph, "2F*")
    read = list(node.args[1])
    node.update_arg(1, (read[0], read[0], *read[2:]))
    with pytest.raises(CheckError, match=r"2F\*|never frees"):
        plan.check()


def swap(graph: fx.Graph, job: str, one: int, other: int) -> None:
    """Two results of a job, for all who read them."""
    results = {n.args[1]: n for n in call(graph, job).users if n.target is getitem}
    results[one].update_arg(1, other)
    results[other].update_arg(1, one)


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_of_another_microbatchs_rows_are_found(stage: int) -> None:
    """Those that are sent to worker 0, and those that worker 1's own encoder reads."""
    plan, graph = copied()
    swap(graph, "2B*", 3 * stage + 1, 3 * stage + 2)
    first = 3 * stage + 1
    message = (
        rf"{stage}B1 reads .* result {first + 1} of 2B\*; it should be result {first}"
    )
    with pytest.raises(CheckError, match=message):
        plan.check()


def test_results_of_two_encoders_may_not_overlap() -> None:
    plan, graph = copied()
    results = {n.args[1]: n for n in call(graph, "2B*").users if n.target is getitem}
    for b in range(3):
        results[3 + b].update_arg(1, 2 + b)
    with pytest.raises(
        CheckError, match=r"B0 reads .* result 2 of 2B\*; it should be result 3"
    ):
        plan.check()


def test_a_value_that_all_microbatches_read_as_it_is() -> None:
    plan, graph = copied(Centred)
    plan.check()
    (mean,) = {call(graph, f"1F{b}").args[1][1] for b in range(3)}  # type: ignore
    assert mean.target is fxsched.ops.recv


def sums(graph: fx.Graph) -> list[fx.Node]:
    """What adds up gradients of several jobs."""
    return [node for node in graph.nodes if node.target is fxsched.ops.add]


@pytest.mark.parametrize("place", [0, 1])
def test_a_gradient_that_counts_twice_for_another_is_found(place: int) -> None:
    plan, graph = copied(Centred)
    first, _ = sums(graph)
    first.update_arg(1 - place, first.args[place])
    message = r"2B\* reads .* it should be \(result 1 of 1B0 \+"
    with pytest.raises(CheckError, match=message):
        plan.check()


def test_a_sum_that_leaves_a_microbatch_out_is_found() -> None:
    plan, graph = copied(Centred)
    first, last = sums(graph)
    last.args = (first,)
    message = r"2B\* reads .* it should be \(result 1 of 1B0 \+"
    with pytest.raises(CheckError, match=message):
        plan.check()


def test_a_sum_that_counts_a_message_twice_is_found() -> None:
    plan, graph = copied(Centred, 0)
    (total,) = sums(graph)
    total.args = total.args * 2
    message = r"2B\* reads .* it should be \(result 1 of 1B0 \+"
    with pytest.raises(CheckError, match=message):
        plan.check()


@pytest.mark.parametrize("workers", [1, 2])
def test_gradients_that_nothing_reads_are_found(workers: int) -> None:
    """Those of the worker itself, and those that come with a message."""
    plan, graph = copied(Centred, 0, workers)
    total = sums(graph)[-1]
    total.args = ()
    message = r"2B\* reads .* it should be \(result 1 of 1B0 \+"
    with pytest.raises(CheckError, match=message):
        plan.check()
