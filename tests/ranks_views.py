"""What each rank of tests/params/test_state.py does with views of a whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_multi_avg_fn,
    get_swa_avg_fn,
)

import fxsched
from fxsched import PlanError, Schedule, schedules
from fxsched.params.released import is_given_up

B = 2


class Net(nn.Module):
    """A tied weight, BatchNorm and a parameter without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.second(self.first(x).tanh())) * self.frozen
        return self.last(h).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def eager(model: nn.Module, x: Tensor) -> None:
    model(x).backward()


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def averaged(model: nn.Module, ema: bool) -> AveragedModel:
    if ema:
        average = get_ema_multi_avg_fn(0.7)
        return AveragedModel(model, multi_avg_fn=average, use_buffers=True)
    return AveragedModel(model, avg_fn=get_swa_avg_fn())


def averages(schedule: Schedule, ema: bool, late: bool, **options: Any) -> None:
    """torch's own class averages over ranks as in one process.

    late: whether it is made after the first step.
    """
    reference, its_optimizer = build()
    model, optimizer = build()
    backend = fxsched.backend(schedule, ["second"], **options)
    step = torch.compile(model, backend=backend)
    mine = its = None
    for number in range(4):
        if mine is None and (number or not late):
            mine, its = averaged(model, ema), averaged(reference, ema)
        eager(reference, batch(number))
        step(batch(number)).backward()
        for each in (optimizer, its_optimizer):
            each.step()
            each.zero_grad()
        if mine is not None and its is not None:
            mine.update_parameters(model)
            its.update_parameters(reference)
        if number == 2:  # evaluation, which brings copies up to date
            with torch.no_grad():
                step.eval()(batch(9))
                step.train()
    assert mine is not None and its is not None
    for tensor, average in zip(model.parameters(), mine.parameters(), strict=True):
        assert is_given_up(tensor) == is_given_up(average)
    assert_close(fxsched.full_state_dict(mine.module), its.module)
    torch._dynamo.reset()
    run = torch.compile(mine.module, backend=fxsched.backend(schedule, ["second"]))
    with torch.no_grad():
        found, wanted = run.eval()(batch(9)), its.module.eval()(batch(9))
    torch.testing.assert_close(found, wanted)


def assert_close(state: dict[str, Any], model: nn.Module) -> None:
    for name, wanted in model.state_dict().items():
        torch.testing.assert_close(state[name], wanted, rtol=1e-4, atol=1e-6)


def views() -> None:
    """Norms and streams are those of one process."""
    reference, _ = build()
    eager(reference, batch(0))
    model, _ = build()
    backend = fxsched.backend(schedules.gpipe(2, B), ["second"], timeout=20)
    torch.compile(model, backend=backend)(batch(0)).backward()
    for norm_type in (2.0, float("inf")):
        for norms in (fxsched.parameter_norms, fxsched.gradient_norms):
            found, wanted = norms(model, norm_type), norms(reference, norm_type)
            assert list(found) == list(wanted)
            for name in wanted:
                torch.testing.assert_close(found[name], wanted[name])
        found_norm = fxsched.gradient_norm(model, norm_type)
        torch.testing.assert_close(
            found_norm, fxsched.gradient_norm(reference, norm_type)
        )
        clipped = fxsched.clip_grad_norm_(model, 1e9, norm_type)
        assert torch.equal(found_norm, clipped)
    rank, names = dist.get_rank(), list(reference.state_dict())
    for reader in (None, 1):
        stream = list(fxsched.stream_state_dict(model, reader))
        whole = fxsched.full_state_dict(model, reader)
        assert [name for name, _ in stream] == names
        if reader in (None, rank):
            assert list(whole) == names
            for name, value in stream:
                assert torch.equal(value, whole[name]), name
                if "norm." not in name:
                    assert torch.equal(value, reference.state_dict()[name])
        else:
            assert whole == {} and all(value is None for _, value in stream)
    refused(lambda: fxsched.full_state_dict(model, 2), "give a rank from 0 to 1, or N")
    refused(lambda: list(fxsched.stream_state_dict(model, rank)), "rank 1 calls stream")


def leaves() -> None:
    """A rank that leaves a stream ends the others, and all go on after that."""
    model, _ = build()
    backend = fxsched.backend(schedules.gpipe(2, B), ["second"], timeout=20)
    torch.compile(model, backend=backend)(batch(0)).backward()
    if dist.get_rank() == 0:
        for _ in fxsched.stream_state_dict(model):
            break
    else:
        refused(
            lambda: list(fxsched.stream_state_dict(model)),
            "rank 0 left stream_state_dict after frozen; go through all of it",
        )
    assert len(fxsched.full_state_dict(model)) == 11


def refused(call: Callable[[], object], words: str) -> None:
    try:
        call()
    except (PlanError, ConnectionError) as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no error that says {words}")


def main() -> None:
    averages(schedules.one_f_one_b(2, B), ema=True, late=False)
    averages(schedules.gpipe(2, B), ema=False, late=True)
    averages(schedules.zero1(2, B), ema=True, late=True)
    averages(schedules.fsdp(2, B), ema=True, late=False)
    averages(schedules.ddp(2, B), ema=False, late=True)
    views()
    leaves()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    print(f"rank {dist.get_rank()}: views")
    dist.destroy_process_group()
