"""Trains a model that fxsched has nothing to do with, and prints what became of it:
python -m tests.ranks_unrelated does it on ranks, beside a model of theirs and after
it."""

from __future__ import annotations

import gc
import hashlib

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel

STEPS = 20


def unrelated() -> str:
    """A digest of a model, its average and its optimizer after some steps."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    average, optimizer = AveragedModel(model), AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for _ in range(STEPS):
        loss = model(torch.randn(4, 8, generator=generator)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        nn.utils.clip_grad_value_(iter(list(model.parameters())), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        average.update_parameters(model)
    state = [*model.parameters(), *average.module.parameters()]
    state += [value for each in optimizer.state.values() for value in each.values()]
    bits = b"".join(each.detach().numpy().tobytes() for each in state)
    return hashlib.sha256(bits).hexdigest()


def beside_ours() -> None:
    """With a model of fxsched's alive, that ranks have between them, and without."""
    import torch.distributed as dist

    import fxsched
    from fxsched.params.record import RECORDS
    from tests.ranks_parameters import batch, build

    dist.init_process_group("gloo")
    model = build()
    with fxsched.backend(fxsched.schedules.one_f_one_b(2, 2), stages=["2"]) as backend:
        run = torch.compile(model, backend=backend)
        optimizer = AdamW(model.parameters())
        run(batch()).square().mean().backward()
        optimizer.step()
        assert len(RECORDS) == len(list(model.parameters()))
        print(f"beside: {unrelated()}", flush=True)
    del model, run, optimizer
    torch._dynamo.reset()
    gc.collect()
    print(f"after: {unrelated()}, {len(RECORDS)} records", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    beside_ours()
