"""Training by any schedule equals eager PyTorch on the same microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import fxsched
from tests.cases import (
    BRANCHING,
    MICROBATCHES,
    MODELS,
    SCHEDULES,
    Result,
    assert_equal,
    build,
    eager_step,
    train,
)
from tests.traced_once import Switch

OPTIMIZERS = ("sgd", "adamw")


@cache
def eager(name: str, count: int = MICROBATCHES) -> dict[str, Result]:
    results = {}
    for optimizer in OPTIMIZERS:
        model, inputs = build(name)

        def step(model=model, inputs=inputs) -> Tensor:
            return eager_step(model, inputs, count)

        results[optimizer] = train(model, step, optimizer)
    return results


@pytest.fixture(autouse=True, scope="module")
def _fresh_dynamo() -> Iterator[None]:
    """After the file, whose schedules share what Dynamo has traced."""
    yield
    torch._dynamo.reset()
    traced.cache_clear()


@cache
def traced(name: str) -> tuple[nn.Module, tuple[Tensor, ...], Switch]:
    """A model, a batch, and the model as Dynamo traces it once for all schedules."""
    model, inputs = build(name)
    return model, inputs, Switch(model, fxsched.backend(SCHEDULES["ddp"]()))


def compiled(name: str, schedule: fxsched.Schedule, **options: object) -> None:
    """Trains once with each optimizer, from the same start, and compares."""
    model, inputs, switch = traced(name)
    start = build(name)[0].state_dict()
    with fxsched.backend(schedule, **options) as backend:
        for optimizer in OPTIMIZERS:
            model.load_state_dict(start)

            def step() -> Tensor:
                loss = switch(backend, *inputs)
                loss.backward()
                return loss

            found = train(model, step, optimizer)
            assert_equal(found, eager(name, schedule.microbatches)[optimizer])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MODELS)
def test_threads_equal_eager(name: str, schedule: str) -> None:
    compiled(name, SCHEDULES[schedule]())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_threads_in_dynamic_order_equal_eager(schedule: str) -> None:
    compiled("two_tower", SCHEDULES[schedule](), order="dynamic")


# The rest of the library, on four workers; below 6 microbatches cuckoo moves nothing.
LIBRARY = {
    "hsdp": {"group_size": 2, "microbatches": 4},
    "zero1": {},
    "zero2": {"microbatches": 8},
    "sharded_groups": {"group_size": 2, "microbatches": 4},
    "hybrid": {"microbatches": 8, "servers": 1, "workers": 3},
    "parameter_server": {"workers": 3, "microbatches": 4},
    "sharded_parameter_server": {"microbatches": 4},
    "naive": {"microbatches": 4},
    "folded": {"microbatches": 4},
    "cuckoo": {"microbatches": 8},
    "overflow": {"microbatches": 8, "stages": 3},
    "looped_bfs": {"microbatches": 4},
    "looped_dfs": {"microbatches": 4},
    "interleaved": {"microbatches": 4},
    "zb_h1": {"microbatches": 8},
    "zb_h2": {"microbatches": 8},
    "zb_v": {"microbatches": 4},
    "v_half": {"microbatches": 4},
    "v_min": {"microbatches": 4},
    "auto": {"microbatches": 4},
    "bubble_filled": {"microbatches": 4},
    "nested": {"microbatches": 4},
}


def library(name: str) -> fxsched.Schedule:
    return fxsched.schedules.LIBRARY[name](**{"workers": 4} | LIBRARY[name])


def test_every_schedule_of_the_library_is_run() -> None:
    known = {"1f1b" if name == "one_f_one_b" else name for name in SCHEDULES}
    equal = set(fxsched.schedules.LIBRARY) - set(fxsched.schedules.STALE)
    assert equal == set(LIBRARY) | known - {"random", "apart"}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", LIBRARY)
def test_the_library_equals_eager(schedule: str) -> None:
    """Of a model without branches, or with some, in turns."""
    number = list(LIBRARY).index(schedule)
    compiled(("gpt", "two_tower")[number % 2], library(schedule))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule", "options"),
    [
        ("two_tower", "zb_h1", {"order": "dynamic"}),
        ("encoder_decoder", "zb_h2", {"carry": "recompute"}),
        ("unet", "zb_v", {"order": "dynamic"}),
        ("gpt", "zb_h1", {"stage_compiler": "inductor"}),
        ("mlp", "zb_v", {"stage_compiler": "inductor"}),
    ],
)
def test_zero_bubble_equals_eager(
    name: str, schedule: str, options: dict[str, str]
) -> None:
    compiled(name, library(schedule), **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "two_tower"])
def test_data_parallel_zero_bubble_equals_eager(name: str) -> None:
    """Both groups sum W's gradients; gpt's token embedding is also its last weight."""
    schedule = fxsched.schedules.zb_h1(workers=2, microbatches=4)
    compiled(name, fxsched.schedules.replicate(schedule, 2))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["graph", "fslpp", "random"])
@pytest.mark.parametrize("name", BRANCHING)
def test_models_with_many_branches_equal_eager(name: str, schedule: str) -> None:
    compiled(name, SCHEDULES[schedule]())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["bubble_filled", "nested"])
def test_encoders_beside_a_trunk_equal_eager(schedule: str) -> None:
    compiled("three_encoder", library(schedule))


@pytest.mark.parametrize("schedule", ["one_f_one_b", "apart"])
@pytest.mark.parametrize("name", ["mlp", "two_tower"])
def test_recomputing_forward_in_backward_equals_eager(name: str, schedule: str) -> None:
    compiled(name, SCHEDULES[schedule](), carry="recompute")


PARKED = {
    "1f1b": lambda: fxsched.schedules.one_f_one_b(3, MICROBATCHES),
    "interleaved": lambda: fxsched.schedules.interleaved(2, MICROBATCHES),
    "zb_h1": lambda: fxsched.schedules.zb_h1(3, MICROBATCHES),
    "fsdp": lambda: fxsched.schedules.fsdp(2, MICROBATCHES),
    "random": SCHEDULES["random"],
}
PLACES = {
    "worker": lambda s, b: (s + b) % 2,
    "disk": lambda s, b: "disk",
    "mixed": lambda s, b: (None, "disk", 1)[(s + b) % 3],
}


@pytest.mark.slow
@pytest.mark.parametrize("carry", ["saved", "recompute"])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("schedule", PARKED)
@pytest.mark.parametrize("name", ["gpt", "two_tower", "unet"])
def test_activations_that_wait_elsewhere_equal_eager(
    name: str, schedule: str, where: str, carry: str
) -> None:
    number = list(PARKED).index(schedule) + len(where)
    order = ("static", "dynamic")[number % 2]
    base = PARKED[schedule]()
    parked = fxsched.schedules.parked(base, PLACES[where])
    compiled(name, parked, carry=carry, order=order)


@pytest.mark.parametrize("where", PLACES)
def test_parked_activations_of_1f1b_equal_eager(where: str) -> None:
    schedule = fxsched.schedules.parked(PARKED["1f1b"](), PLACES[where])
    compiled("mlp", schedule)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule"), [("mlp", "one_f_one_b"), ("two_tower", "fslpp")]
)
def test_inductor_stages_equal_eager(name: str, schedule: str) -> None:
    compiled(name, SCHEDULES[schedule](), stage_compiler="inductor")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["ddp", "gpipe", "one_f_one_b"])
def test_same_order_of_additions_gives_the_same_bits(schedule: str) -> None:
    model, inputs = build("mlp")
    run = torch.compile(model, backend=fxsched.backend(SCHEDULES[schedule]()))
    loss = run(*inputs)
    loss.backward()
    wanted = eager("mlp")["sgd"]
    assert torch.equal(loss.detach(), wanted.losses[0])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, wanted.gradients[name]), name
