"""Saving, loading, clipping and evaluating what one rank of several updates."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import fxsched
from fxsched import schedules
from fxsched.ir.request import Order
from tests.cases import anything, build
from tests.started_ranks import run_ranks
from tests.updates import adamw, batches, build_double, eager


@pytest.mark.slow
def test_two_ranks_that_update_half_each_save_and_resume_as_one_process() -> None:
    done = run_ranks(2, "tests.ranks_updates_state")
    assert done.stdout.count("state of updates") == 2, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("order", ["static", "dynamic"])
def test_owners_that_share_weights_update_them_once(order: Order) -> None:
    """A random w puts a stage's weights on workers that run none of its jobs, which may
    be an update ahead."""
    model, inputs = build_double("gpt")
    schedule = replace(anything(3), update_every=2)
    wanted, reference = eager(model, adamw, inputs, 2)
    optimizer = adamw(model)
    backend = fxsched.backend(
        schedule, transport="threads", order=order, optimizer=optimizer
    )
    with backend:
        step = torch.compile(model, backend=backend)
        losses = [step(*batch).item() for batch in batches(inputs)]
    torch.testing.assert_close(losses, wanted, rtol=1e-7, atol=1e-9)
    found, state = dict(model.state_dict()), dict(reference.state_dict())
    torch.testing.assert_close(found, state, rtol=1e-7, atol=1e-9)


@pytest.mark.slow
def test_copies_are_renewed_before_they_are_sent() -> None:
    """Where the loop steps, and a copy of one worker is what others fetch."""
    model, inputs = build("mlp")
    schedule = replace(schedules.fsdp(2), stages=2, u=lambda s, b: 1 - s)
    fxsched.plan(model, schedule, *inputs).check()


def test_what_an_unchanged_loop_does_besides_is_harmless_or_refused() -> None:
    model, inputs = build("mlp")
    optimizer = adamw(model)
    backend = fxsched.backend(
        schedules.gpipe(2, 4), transport="threads", optimizer=optimizer
    )
    with backend:
        loss = torch.compile(model, backend=backend)(*inputs)
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        optimizer.zero_grad()
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"leave out backward\(\) and optim"):
            loss.backward()
        after = model.state_dict(), optimizer.state_dict()
        torch.testing.assert_close(after, before, rtol=0, atol=0)
