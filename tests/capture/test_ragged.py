"""The last, smaller batch of an epoch: an error, fewer microbatches, or filled up."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, Schedule, schedules

SIZES = {"workers": 4, "microbatches": 8}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Chain(nn.Module):
    """Linear layers; a loss, or what comes out."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def hidden(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        out = self.hidden(x)
        return out if y is None else (out - y).pow(2).mean()


def library() -> list[Schedule]:
    """All schedules of the library, with as few arguments as they take."""
    more = {"hsdp": 2, "sharded_groups": 2, "lpp": 2, "fslpp": 2}
    servers = ("parameter_server", "sharded_parameter_server")
    found = []
    for name, make in schedules.LIBRARY.items():
        sizes = SIZES | ({"group_size": more[name]} if name in more else {})
        if name == "local_sgd":
            sizes["every"] = 1
        if name in servers:
            sizes["microbatches"] = 6
        found.append(make(**sizes))
    return [*found, schedules.replicate(schedules.one_f_one_b(2, 4), 2)]


@pytest.mark.parametrize("schedule", library(), ids=lambda s: s.name)
def test_every_schedule_of_the_library_runs_its_first_microbatches(
    schedule: Schedule,
) -> None:
    whole = fxsched.simulate(schedule)
    for count in (1, 3, 5) if schedule.update_every in (None, 1) else (4,):
        part = fxsched.simulate(schedule.first(count))
        jobs = {e.job for e in whole.timeline if e.job.microbatch < count}
        assert {e.job for e in part.timeline} == jobs
        assert part.latency <= whole.latency + 1e-9


def test_more_microbatches_than_a_schedule_has() -> None:
    with pytest.raises(PlanError, match=r"first\(microbatches=9\): give an int from"):
        schedules.gpipe(4, 8).first(9)


def test_the_error_names_drop_last_and_the_other_ways() -> None:
    message = (
        r"input x has a batch of 7, which does not divide into 4 microbatches; "
        r".*DataLoader\(drop_last=True\).*ragged='fewer'.*ragged='pad'"
    )
    backend = fxsched.backend(schedules.gpipe(2, 4))
    with pytest.raises(PlanError, match=message):
        torch.compile(Chain(), backend=backend)(torch.randn(7, 4), torch.randn(7, 4))


def test_a_way_that_there_is_not() -> None:
    with pytest.raises(PlanError, match=r"backend\(ragged='drop'\): give 'error', "):
        fxsched.backend(schedules.gpipe(2, 4), ragged="drop")


def assert_like_eager(
    run: Any, model: nn.Module, reference: nn.Module, *inputs: Tensor
) -> None:
    """Outputs and gradients, also of inputs, after a mean over what comes out."""
    for each in (model, reference):
        each.zero_grad()
    results = []
    for each in (run, reference):
        own = [x.clone().requires_grad_() for x in inputs]
        result = each(*own)
        result.mean().backward()
        results.append([result.detach(), *(x.grad for x in own)])
    torch.testing.assert_close(*results)
    torch.testing.assert_close(
        [p.grad for p in model.parameters()], [p.grad for p in reference.parameters()]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [
        schedules.one_f_one_b(2, 4),
        schedules.ddp(4),
        schedules.fslpp(4, 2, 4),
        schedules.graph(2, 4),
        schedules.replicate(schedules.zb_h1(2, 2), 2),
        schedules.interleaved(2, 4),
    ],
    ids=lambda s: s.name,
)
def test_fewer_microbatches_have_the_loss_and_gradients_of_eager(
    schedule: Schedule,
) -> None:
    """Smaller batches first and between, as after an evaluation or a resume."""
    model = Chain()
    reference = copy.deepcopy(model)
    backend = fxsched.backend(schedule, ragged="fewer")
    run = torch.compile(model, backend=backend)
    for size, count in ((6, 3), (8, 4), (7, 1), (1, 1), (2, 2)):
        inputs = torch.randn(size, 4), torch.randn(size, 4)
        assert_like_eager(run, model, reference, *inputs)
        assert backend.plan.schedule.microbatches == count


def test_weights_live_where_a_whole_batch_would_have_them() -> None:
    """Of ddp each worker has its own, also where the first batch is a small one."""
    way, x = schedules.ddp(4), torch.randn(6, 4)
    plan = fxsched.plan(Chain(), way, x, x.clone(), ragged="fewer")
    assert plan.schedule.microbatches == 3
    assert {group.owners for group in plan.groups} == {(0, 1, 2, 3)}


@pytest.mark.slow
def test_a_multiple_of_the_batch_in_fewer_microbatches() -> None:
    class Candidates(Chain):
        def forward(self, x: Tensor, cand: Tensor) -> Tensor:  # type: ignore[override]
            near = self.hidden(x)[:, None] * cand.unflatten(0, (x.shape[0], -1))
            return near.sum(2).logsumexp(1).mean()

    model = Candidates()
    reference = copy.deepcopy(model)
    options: dict[str, Any] = {"ragged": "fewer", "batch_dims": {"cand": 0}}
    backend = fxsched.backend(schedules.gpipe(2, 4), **options)
    run = torch.compile(model, backend=backend)
    for size in (8, 6):
        inputs = torch.randn(size, 4), torch.randn(3 * size, 4)
        assert_like_eager(run, model, reference, *inputs)


@pytest.mark.parametrize("order", ["static", "dynamic"])
def test_a_padded_batch_of_rows_is_equal_to_eager(order: str) -> None:
    model = Chain()
    reference = copy.deepcopy(model)
    backend = fxsched.backend(schedules.one_f_one_b(2, 4), order=order, ragged="pad")
    run = torch.compile(model, backend=backend)
    for size in (7, 8, 5, 1):
        assert_like_eager(run, model, reference, torch.randn(size, 4))
    with torch.no_grad():
        x = torch.randn(6, 4)
        torch.testing.assert_close(run(x), reference(x))


@pytest.mark.slow
def test_padding_along_dimension_1_and_of_a_multiple() -> None:
    class Times(Chain):
        def forward(self, x: Tensor, more: Tensor) -> Tensor:  # type: ignore[override]
            return self.hidden(x).cumsum(0) + more.unflatten(0, (-1, 2)).sum(1)

    model = Times()
    reference = copy.deepcopy(model)
    dims = {"x": 1, "more": 0}
    backend = fxsched.backend(schedules.gpipe(2, 4), ragged="pad", batch_dims=dims)
    run = torch.compile(model, backend=backend)
    for size in (7, 6):
        inputs = torch.randn(3, size, 4), torch.randn(2 * size, 4)
        assert_like_eager(run, model, reference, *inputs)


@pytest.mark.slow
def test_padding_is_refused_where_it_would_count() -> None:
    x, y = torch.randn(7, 4), torch.randn(7, 4)

    def refused(message: str, model: nn.Module, *inputs: Tensor) -> None:
        backend = fxsched.backend(schedules.gpipe(2, 4), ragged="pad")
        with pytest.raises(PlanError, match=message):
            torch.compile(model, backend=backend)(*inputs)
        with pytest.raises(PlanError, match=message):
            fxsched.plan(model, schedules.gpipe(2, 4), *inputs, ragged="pad")

    refused(r"but the model returns a scalar; use .*ragged='fewer'", Chain(), x, y)
    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    refused("results of the other samples, since rows of the whole", norm, x)


def test_a_step_of_a_whole_batch_is_not_one_of_a_padded_one() -> None:
    backend = fxsched.backend(schedules.gpipe(2, 4), ragged="pad")
    run = torch.compile(Chain(), backend=backend)
    run(torch.randn(8, 4), torch.randn(8, 4)).backward()
    with pytest.raises(PlanError, match="but the model returns a scalar"):
        run(torch.randn(7, 4), torch.randn(7, 4))
