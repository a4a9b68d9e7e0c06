"""A step of the optimizer stage by stage has the bits of the user's own."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import fxsched
from fxsched import PlanError, Schedule
from fxsched.ir.graphs import Group, Role, State
from fxsched.params.corrections import Corrections
from fxsched.params.updates import StageOptimizers, checked_optimizer

Options = dict[str, Any]
OPTIMIZERS: dict[str, tuple[Options, ...]] = {
    "SGD": (
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "fused": True},
        {"maximize": True},
    ),
    "Adam": ({}, {"amsgrad": True}, {"fused": True}, {"capturable": False}),
    "AdamW": (
        {},
        {"amsgrad": True},
        {"fused": True},
        {"lr": torch.tensor(1e-2), "foreach": False},
    ),
    "NAdam": ({}, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": ({}, {"weight_decay": 0.1}),
    "Adamax": ({},),
    "Adadelta": ({},),
    "Adagrad": ({}, {"fused": True}, {"initial_accumulator_value": 0.5}),
    "ASGD": ({"t0": 1.0},),
    "RMSprop": ({}, {"centered": True, "momentum": 0.9}),
    "Rprop": ({},),
    "Adafactor": ({},),
    "Muon": ({}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}),
}
FOREACH = "SGD Adam AdamW NAdam RAdam Adamax Adadelta Adagrad ASGD RMSprop Rprop"
CASES = [
    (name, {**options, **more})
    for name, all_options in OPTIMIZERS.items()
    for options in all_options
    for more in (
        ({"foreach": False}, {"foreach": True})
        if name in FOREACH.split() and not {"fused", "foreach"} & set(options)
        else ({},)
    )
    if hasattr(torch.optim, name)
]
STAGES, EACH = 4, 3  # the last of a stage has no gradient


def build() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(4, 5)) for _ in range(STAGES * EACH)]


def in_stages(optimizer: Optimizer) -> StageOptimizers:
    corrections = Corrections(Schedule(1, 1), groups())
    return StageOptimizers(optimizer, groups(), False, corrections)


def groups() -> list[Group]:
    return [
        Group(
            tuple(State(EACH * s + k, Role.PARAMETER, "p") for k in range(EACH)),
            (0,),
            (s,),
            (True,) * (EACH - 1) + (False,),
        )
        for s in range(STAGES)
    ]


def grouped(parameters: list[nn.Parameter], name: str, options: Options) -> Optimizer:
    """In two groups, neither of which is in the order of stages."""
    made: Callable[..., Optimizer] = getattr(torch.optim, name)
    both = [{"params": parameters[1::2], "lr": 3e-3}, {"params": parameters[::2]}]
    return made(both, **options)


def gradients(number: int) -> list[Tensor | None]:
    torch.manual_seed(1 + number)
    drawn = [torch.randn(4, 5) for _ in range(STAGES * EACH)]
    return [None if i % EACH == EACH - 1 else g for i, g in enumerate(drawn)]


def own_step(optimizer: Optimizer, parameters: list[nn.Parameter], step: int) -> None:
    for parameter, gradient in zip(parameters, gradients(step), strict=True):
        parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad()


def staged(stages: StageOptimizers, parameters: list[nn.Parameter], step: int) -> None:
    new = gradients(step)
    begun = stages.begin(parameters)
    order = list(range(STAGES))
    random.Random(step).shuffle(order)
    with torch.no_grad():
        for stage in order:
            own = new[EACH * stage : EACH * stage + EACH - 1]
            begun.step(stage, 0, [g for g in own if g is not None], None)


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_stage_by_stage_has_the_bits_of_one_step(name: str, options: Options) -> None:
    mine, its = build(), build()
    fresh = copy.deepcopy(options)
    optimizer, reference = grouped(mine, name, options), grouped(its, name, fresh)
    stages = in_stages(optimizer)
    both = optimizer, reference
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in both]
    for step in range(6):
        staged(stages, mine, step)
        own_step(reference, its, step)
        same(mine, its)
        for scheduler in schedulers:
            scheduler.step()
        if step == 2:  # what a file gives back, loaded in the middle
            state = copy.deepcopy(reference.state_dict())
            for each in both:
                each.load_state_dict(copy.deepcopy(state))
        if step == 3:
            for each in both:
                each.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
                each.param_groups[0]["weight_decay"] = 0.2
    found, wanted = optimizer.state_dict(), reference.state_dict()
    assert sorted(found["state"]) == sorted(wanted["state"])
    same(found["state"], wanted["state"])
    assert found["param_groups"] == wanted["param_groups"]


def test_workers_that_share_tensors_step_once() -> None:
    """Though one of them is two updates ahead of the others."""
    mine, its = build(), build()
    optimizer, reference = (grouped(p, "SGD", {"momentum": 0.9}) for p in (mine, its))
    begun = in_stages(optimizer).begin(mine)
    for step in (0, 1, 0, 0, 1, 2, 2, 1):  # of three workers
        own = [g for g in gradients(step)[:EACH] if g is not None]
        begun.step(0, step, own, None)
    for step in range(3):
        own_step(reference, its, step)
    same(mine[:EACH], its[:EACH])


class Counting(torch.optim.SGD):
    """Counts its steps in its param_groups."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return super().step(closure)


def test_a_step_that_counts_in_its_groups_is_refused() -> None:
    parameters = build()
    stages = in_stages(Counting(parameters))
    with pytest.raises(PlanError, match="changes 'steps' of its param_groups"):
        staged(stages, parameters, 0)


def test_a_step_that_cannot_be_taken_in_stages_is_refused() -> None:
    with pytest.raises(PlanError, match=r"LBFGS.*needs a closure that runs the model"):
        checked_optimizer(torch.optim.LBFGS(build()))
    optimizer = torch.optim.SGD(build())
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(PlanError, match="it has hooks around its step"):
        checked_optimizer(optimizer)
    with pytest.raises(PlanError, match=r"give the torch.optim.Optimizer"):
        checked_optimizer("adam")


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, fxsched.clip_grad_norm_])
def test_clipping_what_the_program_has_stepped_is_refused(clip: Any) -> None:
    parameters = build()
    assert float(clip(parameters, 0.1)) == 0.0  # torch's, of no gradients
    in_stages(torch.optim.SGD(parameters))
    message = r"the program has stepped.*optimizer=optimizer, clip_grad_norm=max_norm"
    with pytest.raises(PlanError, match=message):
        clip(parameters, 0.1)
    parameters[0].grad = torch.ones_like(parameters[0])  # another loop's
    assert clip(parameters, 0.1) > 0 and parameters[0].grad.norm() < 0.11


def test_clipping_values_of_what_the_program_has_stepped_is_refused() -> None:
    parameters = build()
    in_stages(torch.optim.SGD(parameters))
    with pytest.raises(PlanError, match=r"clip_grad_value_ has no gradients to clip"):
        nn.utils.clip_grad_value_((p for p in parameters), 0.1)
    parameters[0].grad = torch.ones_like(parameters[0])
    nn.utils.clip_grad_value_(iter(parameters), 0.1)
    assert parameters[0].grad.max() == torch.tensor(0.1)
