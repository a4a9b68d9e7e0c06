"""What lies between sums in slices: as shards without them, and eager PyTorch."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import fxsched
from fxsched import Plan, PlanError, Schedule, schedules
from fxsched.ir import ops
from fxsched.models.gpt import GPT, GPTConfig
from fxsched.partition.planner import MemoryLimitError
from tests.cases import assert_equal, eager_step, train

NORMS = {"blocks.*_norm": "sequence"}
WIDE = {"width": 128, "heads": 4, "layers": 2, "vocabulary": 64, "length": 64}
SLICED = "between sums, each shard computes one slice of dimension {} in {} operations"


def gpt(**sizes: Any) -> tuple[GPT, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**({"vocabulary": 64, "width": 32, "layers": 2} | sizes)))
    return model, (torch.randint(1, 30, (8, 16)), torch.randint(1, 30, (8, 16)))


def alone(shards: int, microbatches: int = 4) -> Schedule:
    return schedules.sharded(schedules.gpipe(1, microbatches), shards)


def train_both(schedule: Schedule, dropout: float = 0.0, **options: Any) -> Plan:
    """Three steps of AdamW with norms in slices, and in eager PyTorch; with dropout,
    without shards."""
    model, inputs = gpt(dropout=dropout)
    other = copy.deepcopy(model)
    backend = fxsched.backend(schedule, **options)
    base = fxsched.backend(schedules.gpipe(1, schedule.microbatches))
    whole = torch.compile(other, backend=base)
    run = torch.compile(model, backend=backend)

    def stepped(of: Any) -> Tensor:
        loss: Tensor = of(*inputs)
        loss.backward()
        return loss

    def wanted() -> Tensor:
        if dropout:
            return stepped(whole)
        return eager_step(other, inputs, schedule.microbatches)

    torch.manual_seed(3)
    its = train(other, wanted, "adamw")
    torch.manual_seed(3)
    assert_equal(train(model, lambda: stepped(run), "adamw"), its)
    return backend.plan


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "dim", "count"),
    [
        (alone(2), 0, 11),
        (alone(2, 8), 1, 11),  # one row of the batch: of the sequence
        (schedules.sharded(schedules.zb_h1(2, 4), 2), 0, 11),
        (schedules.replicate(alone(4, 2), 2), 1, 11),
    ],
)
def test_norms_in_slices_equal_eager(schedule: Schedule, dim: int, count: int) -> None:
    plan = train_both(schedule, shards=NORMS)
    assert SLICED.format(dim, count) in " ".join(plan.explain().split())


@pytest.mark.slow
def test_dropout_in_slices_draws_the_numbers_of_the_whole() -> None:
    plan = train_both(alone(2), dropout=0.3, shards=NORMS)
    assert SLICED.format(0, 11) in " ".join(plan.explain().split())


def sent(plan: Plan, worker: int) -> list[int]:
    """Bytes of what a worker sends in F of the first microbatch."""
    sends = plan.programs[worker].graph.find_nodes(op="call_function", target=ops.send)
    forward = [n for n in sends if str(n.meta["task"]).startswith("0F0.")]
    return [sum(s.bytes for s in n.args[0].meta["specs"]) for n in forward]


@pytest.mark.slow
def test_slices_are_sent_in_the_place_of_whole_sums() -> None:
    model, inputs = gpt()
    value = 2 * 16 * 32 * 4  # of a microbatch
    plan = fxsched.plan(model, alone(2), *inputs, shards=NORMS)
    # a scattered sum and a gather for each sum, of half of it each
    assert Counter(sent(plan, 1)) == {value // 2: 2 * 4}
    plan = fxsched.plan(model, alone(2), *inputs)
    assert Counter(sent(plan, 1)) == {value: 4}


@pytest.mark.slow
def test_sums_among_four_shards_go_by_slices_where_they_are_large() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**WIDE))
    inputs = torch.randint(1, 60, (16, 64)), torch.randint(1, 60, (16, 64))
    plan = fxsched.plan(model, alone(4, 2), *inputs)
    text = " ".join(plan.explain().split())
    assert "slice" in text
    value = 8 * 64 * 128 * 4
    # a quarter to each of three others, and back; the last sum is shard 0's
    assert sum(sent(plan, 1)) < 4 * 2 * value


@pytest.mark.slow
def test_a_memory_limit_is_that_of_shards() -> None:
    model, inputs = gpt()
    whole = fxsched.plan(model, schedules.gpipe(1, 4), *inputs)
    plan = fxsched.plan(model, alone(2), *inputs)
    most = max(memory.at_once.total for memory in plan.memory)
    assert most < 0.85 * max(memory.at_once.total for memory in whole.memory)
    words = {"blocks.*.feed.0": "column", "blocks.*.feed.2": "row"}
    fxsched.plan(model, alone(2), *inputs, memory_limit=1.05 * most)
    with pytest.raises(MemoryLimitError, match="however stages are cut into shards, a"):
        fxsched.plan(model, alone(2), *inputs, memory_limit=0.95 * most, shards=words)


@pytest.mark.slow
def test_names_of_what_is_not_between_sums_are_refused() -> None:
    model, inputs = gpt()
    with pytest.raises(
        PlanError, match=r"'sequence'}: no operation in modules of that name"
    ):
        fxsched.plan(model, alone(2), *inputs, shards={"tokens": "sequence"})
