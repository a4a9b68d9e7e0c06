"""What needs CUDA GPUs: python -m pytest -m gpu."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import schedules
from fxsched.runtime.device_graphs import Captured
from tests.cases import MICROBATCHES, assert_equal, build, eager_step, train
from tests.started_ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SCHEDULES: dict[str, Callable[[], fxsched.Schedule]] = {
    "ddp": lambda: schedules.ddp(2, MICROBATCHES),
    "fsdp": lambda: schedules.fsdp(2, MICROBATCHES),
    "1f1b": lambda: schedules.one_f_one_b(2, MICROBATCHES),
    "zb_v": lambda: schedules.zb_v(2, MICROBATCHES),
}


@pytest.fixture(autouse=True)
def _in_float32() -> Iterator[None]:
    torch._dynamo.reset()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("name", SCHEDULES)
def test_threads_on_one_gpu_equal_eager(name: str) -> None:
    model, inputs = build("two_tower")
    reference, _ = build("two_tower")
    inputs = tuple(each.cuda() for each in inputs)
    model, reference = model.cuda(), reference.cuda()
    with fxsched.backend(SCHEDULES[name](), transport="threads") as backend:
        compiled = torch.compile(model, backend=backend)

        def step() -> Tensor:
            loss: Tensor = compiled(*inputs)
            loss.backward()
            return loss

        found = train(model, step, "sgd")
    wanted = train(
        reference, lambda: eager_step(reference, inputs, MICROBATCHES), "sgd"
    )
    assert_equal(found, wanted, near=1e-5)


@pytest.mark.parametrize("name", SCHEDULES)
def test_graphs_give_the_same_bits(name: str) -> None:
    found = []
    for capture in (None, "graphs"):
        torch._dynamo.reset()
        model, inputs = build("gpt")
        inputs, model = tuple(each.cuda() for each in inputs), model.cuda()
        given = {"transport": "threads", "capture": capture}
        with fxsched.backend(SCHEDULES[name](), **given) as backend:
            compiled = torch.compile(model, backend=backend)

            def step(run=compiled, inputs=inputs) -> Tensor:
                loss = run(*inputs)
                loss.backward()
                return loss

            with mock.patch.object(
                Captured, "__call__", autospec=True, side_effect=Captured.__call__
            ) as replay:
                found.append(train(model, step, "sgd"))
            assert replay.called == bool(capture)
    plain, replayed = found
    for wanted, result in zip(
        vars(plain).values(), vars(replayed).values(), strict=True
    ):
        torch.testing.assert_close(result, wanted, rtol=0, atol=0)


def test_a_step_does_not_wait_for_the_gpu() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).cuda()
    x = torch.randn(8, 64, device="cuda")
    with fxsched.backend(SCHEDULES["1f1b"](), transport="threads") as backend:
        step = torch.compile(model, backend=backend)
        for _ in range(3):
            step(x).square().mean().backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(x).square().mean().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_the_present_stream_is_kept() -> None:
    """The input is made late, by a stream that only the caller is in."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).cuda()
    x = torch.randn(8, 64, device="cuda")
    with fxsched.backend(SCHEDULES["1f1b"](), transport="threads") as backend:
        step = torch.compile(model, backend=backend)
        wanted = step(x).square().mean()
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(50_000_000)
            late = torch.zeros_like(x).copy_(x)
            found = step(late).square().mean()
            late.fill_(torch.nan)
            torch.testing.assert_close(found, wanted)


def test_times_are_those_of_the_gpu() -> None:
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4))).cuda()
    x = torch.randn(4096, 4096, device="cuda")
    given = {"transport": "threads", "profile": True}
    with fxsched.backend(SCHEDULES["1f1b"](), **given) as backend:
        step = torch.compile(model, backend=backend)
        for _ in range(3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step(x).square().mean().backward()
            end.record()
        end.synchronize()
        jobs = sum(each.end - each.start for each in backend.timeline)
    assert 0.5 < jobs / (begin.elapsed_time(end) / 1e3) < 1.1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_ranks_send_with_nccl() -> None:
    found = run_ranks(2, "tests.ranks_devices", "nccl", "equal", "failure").stdout
    assert found.count("equal to eager") == 2 * 8
    assert found.count("goes on") == 2
