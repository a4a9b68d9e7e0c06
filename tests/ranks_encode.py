"""What each rank of tests/passes/test_encode.py does: casts on ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist

import fxsched
from fxsched import schedules
from tests.passes.test_encode import (
    BOTH,
    FORWARD,
    Way,
    assert_equal_to_casts,
    joint,
    placed,
    skip,
)
from tests.passes.test_precision import ULP, Model, gradients
from tests.passes.test_sums_in_pieces import STAGES, Net, X


def messages(transport: str) -> None:
    """encode= is eager PyTorch with casts."""
    casts = {"ab": BOTH, "ac": BOTH}
    recompute = {"carry": "recompute", "order": "dynamic"}
    for way in (
        Way(placed(0, 1, 1), {}, casts),
        Way(placed(0, 1, 1, later=1), recompute, {**casts, "bc": FORWARD}),
    ):
        assert_equal_to_casts(skip(), way, transport=transport)
    assert_equal_to_casts(skip(joint=True), joint(), 1, transport)


def sums(transport: Any) -> None:
    """Owners get sums with the same bits, and those that threads get."""
    for how in ("pieces", "messages"):
        options: Any = {"sums": how, "encode": {"gradients": torch.int8}}
        found = {}
        for where in (transport, "threads"):
            torch._dynamo.reset()
            model, schedule = Net(), schedules.ddp(2, 4)
            with fxsched.backend(schedule, STAGES, where, **options) as backend:
                torch.compile(model, backend=backend)(X).backward()
            found[where] = [p.grad for p in model.parameters() if p.grad is not None]
        assert len(found[transport]) == len(list(Net().parameters()))
        for mine, own in zip(found[transport], found["threads"], strict=True):
            assert torch.equal(mine, own)


def autocast(transport: str, casts: str) -> None:
    """Casts of the model's are eager's, to an ulp."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(casts == "inside")
    if casts == "parameters":
        model.bfloat16()
    wanted = gradients(eager := copy.deepcopy(model), eager, casts == "around", 4)
    schedule = schedules.one_f_one_b(2, 4)
    with fxsched.backend(schedule, "auto", transport, deterministic=True) as backend:
        step = torch.compile(model, backend=backend)
        found = gradients(model, step, casts == "around", 1)
    own = [i for i, gradient in enumerate(found) if gradient is not None]
    assert 0 < len(own) < len(found)
    for i in own:
        torch.testing.assert_close(found[i], wanted[i], rtol=ULP, atol=0)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for transport in ("distributed", "gloo"):
        messages(transport)
        sums(transport)
        for casts in ("inside", "around", "parameters"):
            autocast(transport, casts)
    print(f"rank {dist.get_rank()}: casts are eager's")
    dist.destroy_process_group()
