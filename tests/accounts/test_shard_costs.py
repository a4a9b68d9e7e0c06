"""What explain() says that shards save, and what they send each other for it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import Schedule, schedules
from fxsched.draw.shard_table import shard_exchange
from fxsched.draw.whole_stages import whole_stages
from fxsched.ir.modes import casts, with_casts
from fxsched.models.gpt import GPT, GPTConfig
from fxsched.plans.plan import Plan

WIDTH, ROWS, MICROBATCHES = 8, 4, 2
VALUE = 4 * WIDTH * ROWS // MICROBATCHES  # bytes of a microbatch of float32


class Blocks(nn.Module):
    """Feed-forward blocks, each of which ends in a sum."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))
            for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def planned(schedule: Schedule, count: int = 3) -> Plan:
    torch.manual_seed(0)
    return fxsched.plan(Blocks(count), schedule, torch.randn(ROWS, WIDTH))


@pytest.mark.slow
@pytest.mark.parametrize(
    "base",
    [
        schedules.zb_h1(2, MICROBATCHES),
        schedules.replicate(schedules.one_f_one_b(1, 1), 2),
    ],
    ids=str,
)
def test_it_is_beside_the_plan_of_the_schedule_without_shards(base: Schedule) -> None:
    plain, plan = planned(base), planned(schedules.sharded(base, 2))
    assert plan.whole is not None
    whole = plan.whole()
    assert plan.whole() is whole and whole.whole is None
    for stage, data in plain.stages.nodes(data=True):
        assert (
            whole.stages.nodes[stage].items()
            >= {
                key: data[key] for key in ("forward", "backward", "weights", "held")
            }.items()
        )
    assert whole.timeline.end == plain.timeline.end
    assert whole.memory[::2] == plain.memory  # shard 0's workers
    assert not any(peaks.at_once.total for peaks in whole.memory[1::2])


@pytest.mark.slow
def test_without_shards_it_is_planned_under_the_call_s_autocast() -> None:
    base = schedules.one_f_one_b(1, MICROBATCHES)
    plain, plan = planned(base), planned(schedules.sharded(base, 2))
    assert plan.whole is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert plan.whole().memory[0] == plain.memory[0]


def test_autocast_is_as_it_was() -> None:
    with torch.autocast("cpu", torch.float16):
        then = casts()
    with torch.autocast("cpu", torch.bfloat16):
        with with_casts(then):
            assert casts() == [("cpu", torch.float16)]
        with with_casts([]):
            assert casts() == []
        assert casts() == [("cpu", torch.bfloat16)]
    with with_casts(then):
        assert casts() == then


def test_shards_send_their_parts_of_each_sum_to_the_others() -> None:
    shards, count = 2, 3
    plan = planned(schedules.sharded(schedules.gpipe(1, MICROBATCHES), shards), count)
    sent = shard_exchange(plan.step)
    # of the last sum, which shard 0 alone reads, one part is sent
    values = (count - 1) * shards * (shards - 1) + 1
    assert sent.forward == sent.backward == MICROBATCHES * values * VALUE
    assert sent.most < sent.forward + sent.backward
    simulated = plan.simulate().workers
    assert sum(w.activations_sent for w in simulated) == 2 * MICROBATCHES * values
    stages = whole_stages(plan.stages)
    assert stages.edges[0, 0]["bytes"] == values * VALUE


def test_what_other_stages_are_sent_is_not_between_shards() -> None:
    base = schedules.one_f_one_b(2, MICROBATCHES)
    one = planned(schedules.sharded(replace(base, stages=2), 2), 4)
    stages = whole_stages(one.stages)
    assert set(stages.edges) == {(0, 0), (0, 1), (1, 1)}
    sent = shard_exchange(one.step)
    each = sum(stages.edges[s, s]["bytes"] for s in range(2))
    assert sent.forward == MICROBATCHES * each


@pytest.mark.slow
def test_explain_says_what_shards_save_and_what_that_costs() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=64, width=32, layers=2))
    tokens = torch.randint(1, 64, (8, 16))
    schedule = schedules.sharded(schedules.one_f_one_b(2, 4), 2)
    text = fxsched.plan(model, schedule, tokens, tokens).explain()
    rows = [line.split() for line in text.split("\n")]
    kinds = ("weights", "gradients", "AdamW's", "activations,", "together")
    first = next(i for i, row in enumerate(rows) if row[:3] == ["held", "by", "a"]) + 2
    saved = rows[first : first + len(kinds)]
    assert tuple(row[0] for row in saved) == kinds
    least = {"activations,": 15}  # all shards hold what they add up
    assert all(float(row[-2]) > least.get(row[0], 30) for row in saved)
    said = " ".join(text.split())
    assert "without shards, on 2 workers; AdamW's state: two numbers for" in said
    (time,) = re.findall(r"predicted step: (\S+ ms),", said)
    assert (
        "in a step, shards send" in said and f"predicted step takes {time} on" in said
    )
    assert max(map(len, text.split("\n"))) <= 100
    assert re.search(r"F \+ B ms +weights +held +shards +sends\n", text)


@pytest.mark.slow
def test_without_shards_nothing_is_said_of_them() -> None:
    plan = planned(schedules.one_f_one_b(2, MICROBATCHES))
    assert plan.whole is None
    assert "without" not in plan.explain() and "shards" not in plan.explain()


def test_what_b_does_not_read_is_not_held() -> None:
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = fxsched.stage_boundary(self.first(x))
            y: Tensor = self.last(x + 1.0)
            return y.sum()

    schedule = schedules.gpipe(2, MICROBATCHES)
    plan = fxsched.plan(Added(), schedule, torch.randn(ROWS, WIDTH))
    assert plan.stages.nodes[1]["held"] == VALUE  # of the sum, not of what is added
