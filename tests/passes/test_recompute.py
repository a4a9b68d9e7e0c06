"""What B computes again: by stage, by module, and as far as a limit asks for it."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fxsched
from fxsched import Plan, PlanError, schedules
from tests.allocated import made
from tests.cases import SCHEDULES, assert_equal, build, eager_step, train


def first_stages(stage: int) -> str:
    return "recompute" if stage < 2 else "saved"


CARRIES: dict[str, Any] = {
    "stages": first_stages,
    "blocks": {"*": "saved", "*.0": "recompute"},
    "all": {"*": "recompute"},
}


@pytest.mark.parametrize("schedule", ["one_f_one_b", "fsdp", "apart"])
@pytest.mark.parametrize("carry", CARRIES)
@pytest.mark.parametrize("name", ["gpt", "two_tower"])
def test_what_is_computed_again_gives_eagers_gradients(
    name: str, carry: str, schedule: str
) -> None:
    torch._dynamo.reset()
    way = SCHEDULES[schedule]()
    model, inputs = build(name)
    wanted = train(model, lambda: eager_step(model, inputs, way.microbatches), "sgd")
    other, _ = build(name)
    compiled = torch.compile(other, backend=fxsched.backend(way, carry=CARRIES[carry]))

    def step() -> torch.Tensor:
        loss: torch.Tensor = compiled(*inputs)
        loss.backward()
        return loss

    assert_equal(train(other, step, "sgd"), wanted)


def planned(**options: Any) -> Plan:
    model, inputs = made("gpt")
    return fxsched.plan(model, schedules.one_f_one_b(2, 8), *inputs, **options)


def most(plan: Plan) -> float:
    return max(peaks.at_once.total for peaks in plan.memory)


def test_a_stage_or_a_block_alone_is_computed_again() -> None:
    plain = planned().memory
    first = planned(stages=("blocks.2",), carry=lambda s: ("recompute", "saved")[s])
    assert first.memory[0].each.activations < 0.5 * plain[0].each.activations
    assert first.memory[1].each.activations > 0.8 * plain[1].each.activations
    blocks = planned(carry={"blocks.*": "recompute"})
    assert most(blocks) < 0.6 * max(each.at_once.total for each in plain)


@pytest.mark.slow
def test_blocks_are_computed_again_as_far_as_a_limit_asks_for_it() -> None:
    plain = planned()
    step = plain.simulate().latency
    for share, longer in ((1.0, 1.0), (0.8, 1.15), (0.65, 1.2)):
        limit = share * most(plain)
        plan = planned(memory_limit=limit)
        assert most(plan) <= limit
        assert plan.simulate().latency <= longer * step
    stages = ("blocks.2",)  # that are named are kept
    named = planned(stages=stages, memory_limit=0.8 * most(planned(stages=stages)))
    assert len(named.stages) == 2 and "computes of blocks" in named.explain()
    with pytest.raises(PlanError, match=r"found holds (\d+) bytes on worker \d"):
        planned(memory_limit=0.2 * most(plain))


class Pairs(nn.Module):
    """Blocks, and a loss over all pairs of rows, for which all microbatches wait."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
                for _ in range(8)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.blocks(x)
        return nn.functional.cross_entropy(y @ y.mT, torch.arange(len(y)))


@pytest.mark.slow
def test_no_more_blocks_are_computed_again_where_all_microbatches_are_in_flight() -> (
    None
):
    schedule, x = schedules.one_f_one_b(2, 8), torch.randn(512, 64)
    plain = fxsched.plan(Pairs(), schedule, x, pairs="joint")
    limit = 0.8 * most(plain)
    plan = fxsched.plan(Pairs(), schedule, x, pairs="joint", memory_limit=limit)
    assert 0.7 * most(plain) < most(plan) <= limit
    assert plan.simulate().latency < 1.15 * plain.simulate().latency


class Selective(nn.Module):
    def __init__(self, contexts: Any) -> None:
        super().__init__()
        layers = (nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.block, self.contexts = nn.Sequential(*layers), contexts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        more = {"context_fn": self.contexts} if self.contexts else {}
        y: torch.Tensor = checkpoint(self.block, x, use_reentrant=False, **more)
        return y.square().mean()


def keeps_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    product = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


def test_a_policy_of_a_checkpoint_says_what_is_saved() -> None:
    x, held, selective = torch.randn(8, 16), [], create_selective_checkpoint_contexts
    listed = partial(selective, [torch.ops.aten.gelu.default])
    for contexts in (None, partial(selective, keeps_products), listed):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Selective(contexts)
        model(x).backward()
        wanted = [p.grad for p in model.parameters()]
        model.zero_grad()
        backend = fxsched.backend(schedules.gpipe(1, 2))
        torch.compile(model, backend=backend)(x).backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], wanted)
        assert backend.plan is not None
        held.append(backend.plan.memory[0].each.activations)
    more = 2 * 4 * 64 * 4  # microbatches, rows, and float32 of the hidden layer
    assert held == [held[0], held[0] + more, held[0] + more]
    with pytest.raises(PlanError, match="create_selective_checkpoint_contexts, or lea"):
        torch._dynamo.reset()
        other = Selective(lambda: (nullcontext(), nullcontext()))
        fxsched.plan(other, schedules.gpipe(1, 2), x)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x)).square().mean()


def test_errors_name_the_option_and_what_is_allowed() -> None:
    for carry, text in (
        ({"block.*": "recompute"}, r"'block\.\*'.*name one, such as blocks"),
        (lambda s: 3, r"carry\(0\) returned 3; return 'saved' or 'recompute'"),
        (lambda s: 1 // 0, r"carry\(0\) .*ZeroDivisionError"),
        ({"blocks.0": "twice"}, "give 'auto', 'saved', 'recompute', a function"),
    ):
        with pytest.raises(PlanError, match=text):
            planned(carry=carry)
    with pytest.raises(PlanError, match="norm writes into a buffer"):
        fxsched.plan(
            Counted(),
            schedules.gpipe(1, 2),
            torch.ones(4, 8),
            carry={"norm": "recompute"},
            batch_norm="microbatch",
        )


@pytest.mark.parametrize("carry", ["recompute", {"blocks.*": "recompute"}])
def test_a_profile_has_the_times_of_operations_that_run_once(carry: Any) -> None:
    """From a step whose B runs F again, and for one whose B does."""
    model, inputs = build("gpt")
    schedule = schedules.gpipe(1, 4)

    def step(**options: Any) -> fxsched.Plan:
        return fxsched.plan(model, schedule, *inputs, **options)

    free, again = step(), step(carry=carry)
    profile = again.profile(list(again.timeline))
    wanted = [each.simulate().latency for each in (free, again)]
    assert wanted[1] > 1.2 * wanted[0]
    found = [step(profile=profile), step(profile=profile, carry=carry)]
    assert [p.simulate().latency for p in found] == pytest.approx(wanted, rel=0.05)
    paces = {"F": 2.0, "B": 1.5}
    slower = [
        e._replace(end=e.start + (e.end - e.start) * paces[e.job.direction.value])
        for e in again.timeline
    ]
    other = step(profile=again.profile(slower), carry=carry).stages.nodes[0]
    planned = again.stages.nodes[0]
    assert other["forward"] == pytest.approx(2.0 * planned["forward"])
    assert other["backward"] == pytest.approx(1.5 * planned["backward"], rel=0.01)
