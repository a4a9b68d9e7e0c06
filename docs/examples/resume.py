"""Trains on ranks, saves checkpoints, and goes on from the last one when run again.

    torchrun --nproc-per-node 2 resume.py --steps 20       # stop it whenever you like
    torchrun --nproc-per-node 2 resume.py --steps 40       # goes on where it was
    torchrun --nproc-per-node 4 resume.py --schedule fsdp --steps 60
    python resume.py --steps 80                            # workers are threads

Each run may have other ranks and another schedule. The optimizer, the learning rate
and all random generators go on, too. With torchrun's --max-restarts a training whose
rank was lost begins again at the last checkpoint by itself.
"""

import argparse
import os
from pathlib import Path

import torch

import fxsched
from fxsched.models import sources
from fxsched.models.gpt import GPT, GPTConfig


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40, help="of all runs together")
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    options = parser.parse_args()
    workers = int(os.environ.get("WORLD_SIZE", options.workers))  # torchrun sets it
    first = int(os.environ.get("RANK", 0)) == 0

    torch.manual_seed(0)
    model = GPT(GPTConfig(dropout=0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5)
    make = fxsched.schedules.LIBRARY[options.schedule]
    schedule = make(workers=workers, microbatches=options.microbatches)

    with fxsched.backend(schedule) as backend:
        step = torch.compile(model, backend=backend)
        begin = 0
        if (options.folder / "latest").exists():
            extra = {"scheduler": scheduler}
            rest = fxsched.load(options.folder, model, optimizer, backend, extra)
            begin = rest["step"]
            if first:
                print(f"goes on after step {begin}")

        text = sources.load_text().train
        for number in range(begin, options.steps):
            # the step's number gives its batch, so a new run goes on with new batches
            draws = torch.Generator().manual_seed(number)
            loss = step(*sources.windows(text, 32, 32, draws))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if (number + 1) % options.save_every == 0:
                extra = {"scheduler": scheduler, "step": number + 1}
                fxsched.save(options.folder, model, optimizer, backend, extra, keep=2)
                if first:
                    print(f"step {number + 1}: loss {loss.item():.6f}, saved")


if __name__ == "__main__":
    main()
