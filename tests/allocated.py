"""Bytes of the tensors that a worker really holds in a step, beside plan.memory's.

python -m tests.allocated SCHEDULE .. [--model gpt] [--carry saved]; under torchrun each
rank is a worker and prints its own; [--transport gloo] shares no memory. A tensor
counts from the operation that makes it, or that is the first to read it, until its
memory is free; what was there before the step doesn't.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import fxsched
from fxsched.models.gpt import GPT, GPTConfig
from fxsched.runtime.run import Run
from tests.cases import build
from tests.encoders import MODELS as ENCODERS
from tests.simulated import library


class Allocated(TorchDispatchMode):
    """Counts memory of tensors that operations meet; peak: the most bytes at one time.

    there: what was there before.
    """

    def __init__(self, there: Iterable[Tensor]) -> None:
        super().__init__()
        self.there = {each.untyped_storage()._cdata for each in there}
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        gone = [key for key, (alive, _) in self.live.items() if alive.expired()]
        for key in gone:
            del self.live[key]
        sent = func is torch.ops.aten.copy_.default  # to where its receiver has it
        self._meet(args[1:] if sent else (args, kwargs))
        result = func(*args, **(kwargs or {}))
        self._meet(() if sent else result)
        return result

    def _meet(self, values: Any) -> None:
        for each in tree_leaves(values):
            if isinstance(each, Tensor):
                memory = each.untyped_storage()
                if memory._cdata not in self.there and memory._cdata not in self.live:
                    known = StorageWeakRef(memory), memory.nbytes()
                    self.live[memory._cdata] = known
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))


class Held(NamedTuple):
    """Bytes besides weights: as planned, and as they were."""

    planned: float
    measured: int


def held(
    model: nn.Module,
    inputs: tuple[Any, ...],
    schedule: fxsched.Schedule,
    **options: Any,
) -> Held:
    """What this rank, or a schedule's only worker, holds in its second step."""
    backend = fxsched.backend(schedule, **options)
    compiled = torch.compile(model, backend=backend)
    compiled(*inputs).backward()
    measured = most_held(compiled, model, inputs)
    rank = dist.get_rank() if dist.is_initialized() else 0
    plan = backend.plan
    assert plan is not None
    most = plan.memory[rank].at_once
    return Held(most.total - most.weights - most.state, measured)


def most_held(
    compiled: Callable[..., Tensor], model: nn.Module, inputs: tuple[Any, ...]
) -> int:
    """Bytes besides weights and inputs that this rank holds at most in a step of a
    compiled model that has run."""
    model.zero_grad()
    tensors = (each for each in tree_leaves(inputs) if isinstance(each, Tensor))
    mode = Allocated([*model.parameters(), *model.buffers(), *tensors])
    advance = Run.advance

    def counted(self: Run, tangents: object = None) -> object:
        with mode:
            return advance(self, tangents)

    with mock.patch.object(Run, "advance", counted):
        compiled(*inputs).backward()
    model.zero_grad()
    return mode.peak


class Checkpointed(nn.Module):
    """A GPT, some of whose blocks torch.utils.checkpoint marks."""

    def __init__(self, gpt: GPT, marked: int) -> None:
        super().__init__()
        self.gpt, self.marked = gpt, marked

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        gpt = self.gpt
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = gpt.dropout(gpt.tokens(tokens) + gpt.positions(places))
        for number, block in enumerate(gpt.blocks):
            if number < self.marked:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        logits = gpt.head(gpt.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt(marked: int = 0) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A GPT whose activations weigh as much as its weights."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=512, length=64, width=64, layers=4))
    tokens, targets = (torch.randint(1, 500, (16, 64)) for _ in range(2))
    return Checkpointed(model, marked) if marked else model, (tokens, targets)


def clip() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A CLIP of a ResNet-18 and a transformer."""
    torch.manual_seed(0)
    return ENCODERS["clip"]()


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "gpt": gpt,
    "some blocks": lambda: gpt(2),
    "all blocks": lambda: gpt(4),
    "clip": clip,
}


def made(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """One of these models or of tests.cases, with its inputs."""
    return MODELS[name]() if name in MODELS else build(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schedules", nargs="+")
    parser.add_argument("--model", default="gpt")
    parser.add_argument("--carry", default="saved")
    parser.add_argument("--transport", help="of ranks; gloo: no memory is shared")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    workers = dist.get_world_size() if dist.is_initialized() else 1
    for name in options.schedules:
        torch._dynamo.reset()
        model, inputs = made(options.model)
        own = {"carry": options.carry, "transport": options.transport}
        mine = held(model, inputs, library(name, workers, 8), **own)
        everyone: list[Any] = [mine]
        if dist.is_initialized():
            everyone = [None] * workers
            dist.all_gather_object(everyone, mine)
        for rank, (planned, measured) in enumerate(everyone):
            if not dist.is_initialized() or not dist.get_rank():
                print(
                    f"{options.model}, {name}, {options.carry}, worker {rank}: "
                    f"{planned:.0f} planned, {measured} held, {planned / measured:.3f}",
                    flush=True,
                )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
