"""What each rank of tests/runtime/test_outputs_ranks.py does with a GradScaler: the
steps of one process, whichever rank's gradients overflow."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, Schedule, schedules

PARTS = 2
STEPS = 6


class Loud(nn.Module):
    """One of its layers has gradients that overflow in float16 from some scale on."""

    def __init__(self, first: float, second: float, loss: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.factors, self.loss = (first, second), loss

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.factors
        rows = (self.first(x) * first).float() + (self.second(x) * second).float()
        return rows.mean() if self.loss else rows


def half() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.float16)


def train(
    model: nn.Module, run: Any, clip: Any, scaler: Any, parts: int, **adamw: Any
) -> list[float]:
    """Steps with plain PyTorch's loop; the scale after each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **adamw)
    torch.manual_seed(0)
    scales = []
    for _ in range(STEPS):
        for part in torch.randn(4, 8).chunk(parts):
            with half():
                out = run(part)
            scaler.scale(out.mean() / parts).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            clip(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def new_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=1)


def compare(
    factors: tuple[float, float],
    schedule: Schedule,
    loss: bool,
    clips: bool,
    **adamw: Any,
) -> None:
    """Weights and scales are those of one process."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Loud(*factors, loss)
    whole, scaler = copy.deepcopy(model), new_scaler()
    options = {"loss_scale": scaler} if loss else {}
    with fxsched.backend(schedule, stages=["first", "second"], **options) as backend:
        run = torch.compile(model, backend=backend)
        clip = (lambda m: fxsched.clip_grad_norm_(m, 0.1)) if clips else None
        scales = train(model, run, clip, scaler, 1, **adamw)
        found = fxsched.full_state_dict(model)
    clip = (lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1)) if clips else None
    wanted = train(whole, whole, clip, new_scaler(), PARTS, **adamw)
    assert scales == wanted, (scales, wanted)
    assert max(wanted) > min(wanted), "it both steps and skips"
    torch.testing.assert_close(found, whole.state_dict(), rtol=1e-3, atol=1e-4)


def differ() -> None:
    """A number for a scale makes gradients infinite everywhere; scales that differ are
    an error."""
    torch._dynamo.reset()
    model, rank = Loud(1e3, 1.0, True), dist.get_rank()
    options = {"stages": ["first", "second"], "loss_scale": 2.0**16}
    with fxsched.backend(schedules.gpipe(2, PARTS), **options) as backend:
        with half():
            loss = torch.compile(model, backend=backend)(torch.randn(4, 8))
        (loss * 2.0**16).backward()
    own = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(own) == 2 and all(bool(grad.isinf().all()) for grad in own)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**rank)
    scaler.scale(torch.ones(()))
    with pytest.raises(PlanError, match=r"with scale 2, but rank 0 .* with scale 1"):
        scaler.unscale_(torch.optim.SGD(model.parameters()))


def scalers() -> None:
    """All ranks skip what one would, and those that update nothing go along."""
    pipeline, server = schedules.gpipe(2, PARTS), schedules.parameter_server(2, PARTS)
    compare((1e3, 1.0), pipeline, loss=True, clips=False)
    compare((1.0, 1e3), pipeline, loss=False, clips=True)
    compare((1e3, 1.0), server, loss=True, clips=True)
    compare((1.0, 1e3), server, loss=False, clips=False, fused=True)
    differ()
    print(f"rank {dist.get_rank()}: scalers hold")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    scalers()
    dist.destroy_process_group()
