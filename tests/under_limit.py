"""A step of a GPT under a limit of memory: python -m tests.under_limit HOW LIMIT FILE.

HOW is "eager", or where activations of gpipe on two workers wait: "memory" or "disk".
LIMIT is of the process's data (RLIMIT_DATA) in MiB, from its start on; 0 for none. FILE
gets the loss and the gradients. Ends with 1 and the error where memory is out.
"""

from __future__ import annotations

import resource
import sys

import torch

import fxsched
from fxsched import schedules
from fxsched.models.gpt import GPT, GPTConfig

ROWS, MICROBATCHES = 384, 32


def main() -> None:
    how, limit, file = sys.argv[1:]
    if int(limit):
        resource.setrlimit(resource.RLIMIT_DATA, (int(limit) << 20,) * 2)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=64, length=128, width=96, layers=8))
    tokens, targets = (torch.randint(0, 64, (ROWS, 128)) for _ in range(2))
    if how == "eager":
        loss = model(tokens, targets)
    else:
        schedule = schedules.gpipe(2, MICROBATCHES)
        if how == "disk":
            schedule = schedules.parked(schedule, "disk")
        loss = torch.compile(model, backend=fxsched.backend(schedule))(tokens, targets)
    loss.backward()
    found = {name: weight.grad for name, weight in model.named_parameters()}
    torch.save({"loss": loss.detach(), **found}, file)


if __name__ == "__main__":
    main()
