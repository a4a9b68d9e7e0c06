"""The verifier finds rows of a microbatch where another's belong."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from operator import getitem

import pytest
import torch
from torch import Tensor, fx, nn

import fxsched
from fxsched import CheckError, Job, Plan
from fxsched.checker.check_joint import JointUse, Rows, joint_fault


def reads(microbatches: Sequence[int], first: int = 0) -> list[JointUse]:
    """What 2F* reads, place by place, of which microbatch."""
    job = Job.parse("2F*")
    return [
        JointUse(0, job, (1, first + i), f"v{i}", Rows(frozenset({b}), (), ()))
        for i, b in enumerate(microbatches)
    ]


def gives(*results: int, place: int = 0, stage: int = 3) -> list[JointUse]:
    """The results of 2F* that each microbatch of a stage reads at a place."""
    part = Job.parse("2F*")
    return [
        JointUse(
            1,
            Job.parse(f"{stage}F{b}"),
            (1, place),
            f"u{b}",
            Rows(frozenset(), ((part, result),), ()),
        )
        for b, result in enumerate(results)
    ]


def test_runs_of_all_microbatches_in_order_are_sound() -> None:
    assert joint_fault(reads([0, 1, 2, 0, 1, 2]), 3) is None
    assert joint_fault(reads([0, 1, 2]) + reads([0, 1, 2], first=5), 3) is None
    both = gives(0, 1, 2) + gives(3, 4, 5, place=1) + gives(0, 1, 2, stage=4)
    assert joint_fault(both, 3) is None
    assert joint_fault(gives(0, 1, 2) + gives(3, 3, 3, place=1), 3) is None


FAULTS = {
    "swapped": (reads([0, 2, 1]), "2F. reads v1, of microbatch 2, where that of 1"),
    "twice": (reads([0, 1, 1]), "2F. reads v2, of microbatch 1, where that of 2"),
    "the first left out": (reads([1, 2, 0]), "reads v0, of microbatch 1, where that"),
    "the last left out": (reads([0, 1]), "2F. reads nothing of microbatch 2 after v1"),
    "apart": (reads([0]) + reads([1, 2], first=2), "where that of 1 belongs"),
    "rows of another": (gives(0, 2, 1), "results 0, 2, 1 of 2F., not the rows of each"),
    "the same twice": (gives(0, 0, 2), "results 0, 0, 2 of 2F."),
    "rows of one for all": (gives(0, 1, 2) + gives(1, 1, 1, place=1), "elsewhere"),
    "later by one": (gives(0, 1, 2) + gives(1, 2, 3, place=1), "elsewhere"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_rows_of_another_microbatch_are_a_fault(fault: str) -> None:
    uses, message = FAULTS[fault]
    found = joint_fault(uses, 3)
    assert found is not None and re.search(message, found), found


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
    which has the joint stage and the second encoder, or another."""
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
    message = r"2F\* reads .*, of microbatch 1, where that of 0 belongs"
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
    first, *others = (3 * stage + i for i in (0, 2, 1))
    results = ", ".join(map(str, [first, *others]))
    message = rf"of {stage}B0, and what its stage .* results {results} of 2B\*"
    with pytest.raises(CheckError, match=message):
        plan.check()


def test_results_of_two_encoders_may_not_overlap() -> None:
    plan, graph = copied()
    results = {n.args[1]: n for n in call(graph, "2B*").users if n.target is getitem}
    for b in range(3):
        results[3 + b].update_arg(1, 2 + b)
    with pytest.raises(CheckError, match="which is that of another microbatch"):
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
    message = r"2B\* reads .*, in which the gradient that 1B0 gives"
    with pytest.raises(CheckError, match=message):
        plan.check()


def test_a_sum_that_leaves_a_microbatch_out_is_found() -> None:
    plan, graph = copied(Centred)
    first, last = sums(graph)
    last.args = (first,)
    message = r"2B\* reads .*, in which the gradient that 1B2 gives is missing or"
    with pytest.raises(CheckError, match=message):
        plan.check()


def test_a_sum_that_counts_a_message_twice_is_found() -> None:
    plan, graph = copied(Centred, 0)
    (total,) = sums(graph)
    total.args = total.args * 2
    message = r"2B\* reads .*, in which the gradient that 1B0 gives is missing or"
    with pytest.raises(CheckError, match=message):
        plan.check()


@pytest.mark.parametrize("workers", [1, 2])
def test_gradients_that_nothing_reads_are_found(workers: int) -> None:
    """Those of the worker itself, and those that come with a message."""
    plan, graph = copied(Centred, 0, workers)
    total = sums(graph)[-1]
    total.args = ()
    message = r"worker 0: (1B2|\dB\*): \w+ is read by nothing"
    with pytest.raises(CheckError, match=message):
        plan.check()


def test_one_microbatch_that_reads_another_value_is_found() -> None:
    """Its rows, in place of the mean."""
    uses = gives(4, 4, 4) + gives(0, 1, 2, place=1)
    assert joint_fault(uses, 3) is None
    for other in (gives(4, 0, 4), gives(4, 4, 5), gives(1, 1, 1)):
        assert joint_fault(other + uses[3:], 3) is not None


def test_b_that_reads_another_value_than_f_is_found() -> None:
    """In all microbatches alike."""
    shown = [
        use._replace(job=Job.parse(f"3F{b}")) for b, use in enumerate(gives(4, 4, 4))
    ]
    again = [
        use._replace(job=Job.parse(f"3B{b}"), place=(2, 0))
        for b, use in enumerate(gives(4, 4, 4))
    ]
    assert joint_fault(shown + again, 3) is None
    other = [use._replace(rows=gives(5)[0].rows) for use in again]
    found = joint_fault(shown + other, 3)
    assert (
        found == "worker 1: 3B0 reads u0, result 5 of 2F*, which F did not read there"
    )
