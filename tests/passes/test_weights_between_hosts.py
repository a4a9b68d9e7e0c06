"""Weights from another host: one worker of a host asks for them, and hands them on."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

import fxsched
from fxsched import schedules
from fxsched.checker.summary import CheckError
from fxsched.ir import ops
from fxsched.ir.meta import of_call
from fxsched.ir.step import Message, Weights

from .test_sums_in_pieces import STAGES, TWO_HOSTS, Net, X, _equal


def _plan() -> fxsched.Plan:
    four = schedules.fsdp(4, 4)
    return fxsched.plan(Net(), four, X, stages=STAGES, network=TWO_HOSTS)


@pytest.mark.parametrize("order", ["static", "dynamic"])
@pytest.mark.parametrize("prefetch", [1, 3])
def test_weights_that_are_handed_on_equal_eager(order: str, prefetch: int) -> None:
    options = {"order": order, "prefetch": prefetch, "network": TWO_HOSTS}
    plan = _equal(schedules.fsdp(4, 8), stages=STAGES, **options)
    assert any(line.hands_on for line in plan.lines if isinstance(line, Message))


def test_a_worker_alone_on_its_host_asks_again_itself() -> None:
    apart = fxsched.Network([[0], [1]], *2 * [fxsched.Rate(1e9)])
    options = {"prefetch": 3, "network": apart, "stages": ["blocks.2"]}
    plan = _equal(schedules.fsdp(2, 4), **options)
    assert not any(line.hands_on for line in plan.lines if isinstance(line, Message))


def test_updated_weights_are_handed_on() -> None:
    def trained(network: fxsched.Network | None) -> list[torch.Tensor]:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = replace(schedules.fsdp(4, 8), update_every=4)
        backend = fxsched.backend(
            schedule, STAGES, optimizer=optimizer, network=network
        )
        step = torch.compile(model, backend=backend)
        for _ in range(2):
            step(X)
        backend.close()
        return [p.detach() for p in model.parameters()]

    for mine, other in zip(trained(TWO_HOSTS), trained(None), strict=True):
        torch.testing.assert_close(mine, other)


def test_weights_from_other_hosts_are_asked_for_two_jobs_ahead() -> None:
    def steps(prefetch: int | None) -> list[list[str]]:
        four = schedules.fsdp(4, 4)
        options = {"stages": STAGES, "prefetch": prefetch}
        plans = (
            fxsched.plan(Net(), four, X, network=network, **options)
            for network in (None, TWO_HOSTS)
        )
        return [[*map(str, plan.lines)] for plan in plans]

    default, one, two = steps(None), steps(1), steps(2)
    assert default == [one[0], two[1]] and one != two


def test_a_host_gets_weights_once_for_all_its_workers() -> None:
    plan = _plan()
    came = Counter(
        (line.value, line.task[1])  # F or B
        for line in plan.lines
        if isinstance(line, Message) and isinstance(line.value, Weights)
        if (line.value.worker < 2) != (line.to < 2)
    )
    assert len(came) == 6  # of 4 stages, for F and B; for two, once for both
    assert set(came.values()) == {1}


def test_the_proof_finds_other_weights_handed_on() -> None:
    plan = _plan()
    for program in plan.programs:
        fetched = [n for n in program.graph.nodes if n.target is ops.fetch]
        handed = [n for n in fetched if any(u.target is ops.send for u in n.users)]
        if handed:
            send = next(u for u in handed[0].users if u.target is ops.send)
            wrong = next(
                n for n in fetched if of_call(n)["group"] != of_call(handed[0])["group"]
            )
            send.replace_input_with(handed[0], wrong)
            break
    else:
        raise AssertionError("nothing is handed on")
    with pytest.raises(CheckError):
        plan.check()
