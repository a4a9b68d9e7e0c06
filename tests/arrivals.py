"""What tests of updates in order of arrival share."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

import fxsched
from fxsched import Plan, Schedule
from fxsched.ir.request import Order, Transport
from tests.updates import TOLERANCE, adamw, batches, build_double

CALLS = 4


def whole(name: str, microbatches: int) -> tuple[Tensor, ...]:
    """A batch of as many samples as microbatches."""
    _, inputs = build_double(name)
    return tuple(torch.cat([x] * 3)[:microbatches] for x in inputs)


def check(
    schedule: Schedule,
    name: str = "mlp",
    transport: Transport | None = "threads",
    order: Order = "dynamic",
    **options: Any,
) -> Plan:
    """Some calls of a plan end with the parameters of their replay."""
    model, _ = build_double(name)
    mine = copy.deepcopy(model)
    backend = fxsched.backend(
        schedule, transport=transport, order=order, optimizer=adamw(mine), **options
    )
    step = torch.compile(mine, backend=backend)
    rows = list(batches(whole(name, schedule.microbatches), CALLS))
    losses, arrivals = [], []
    for batch in rows:
        losses.append(step(*batch).item())
        arrivals.append(backend.arrivals if order == "dynamic" else ())
    plan = backend.plan
    assert plan is not None and plan.by_arrival == (order == "dynamic")
    clip = options.get("clip_grad_norm")
    recorded = arrivals if plan.by_arrival else None
    optimizer = adamw(model)
    wanted = fxsched.replay(plan, model, optimizer, rows, clip, arrivals=recorded)
    assert_close(losses, wanted, **TOLERANCE)
    state, others = fxsched.full_state_dict(mine), dict(model.state_dict())
    assert_close(dict(state), others, **TOLERANCE)
    backend.close()
    return plan
