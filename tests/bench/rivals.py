"""What fxsched is held against: PyTorch in one process, and torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from .language import Setup
from .measure import Contestant

PIPELINES = MappingProxyType(
    {
        "torch-gpipe": ScheduleGPipe,
        "torch-1f1b": Schedule1F1B,
        "torch-interleaved": ScheduleInterleaved1F1B,
    }
)


def alone(setup: Setup, threads: int = 1) -> Contestant:
    """All microbatches on rank 0, with so many intra-op threads.

    The others are in the barrier of the next contestant meanwhile, off their core.
    """
    model = setup.model()
    if setup.compiled:
        model.compile()
    pieces = setup.pieces()

    def step() -> None:
        if dist.get_rank():
            return
        torch.set_num_threads(threads)
        for piece in pieces:
            (model(*piece) / len(pieces)).backward()
        torch.set_num_threads(1)

    return Contestant("alone" if threads == 1 else f"alone-{threads}", model, step)


def ddp(setup: Setup) -> Contestant:
    """Gradients meet in the last of a rank's microbatches."""
    model = setup.model()
    if setup.compiled:
        model.compile()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    *first, last = setup.pieces()[dist.get_rank() :: dist.get_world_size()]

    def step() -> None:
        with wrapped.no_sync():
            for piece in first:
                (wrapped(*piece) / (len(first) + 1)).backward()
        (wrapped(*last) / (len(first) + 1)).backward()

    return Contestant("torch-ddp", model, step)


def fsdp(
    setup: Setup, name: str, gather: str = "each job", reduce_each: bool = False
) -> Contestant:
    """fully_shard of each block and of the rest.

    gather: when weights are gathered: before "each job", before each microbatch's F to
        stay until its B ("microbatch"), or once, to stay for all microbatches ("step").
    reduce_each: whether gradients are summed after each microbatch, or after the last.
    """
    model = setup.model()
    mesh = init_device_mesh(setup.device.type, (dist.get_world_size(),))
    for block in model.blocks:
        if setup.compiled:
            block.compile()
        fully_shard(block, mesh=mesh, reshard_after_forward=gather == "each job")
    whole = fully_shard(model, mesh=mesh)
    pieces = setup.pieces()[dist.get_rank() :: dist.get_world_size()]

    def step() -> None:
        for piece in pieces:
            last = piece is pieces[-1]
            whole.set_requires_gradient_sync(last or reduce_each)
            whole.set_reshard_after_backward(last or gather != "step")
            (model(*piece) / len(pieces)).backward()

    return Contestant(name, model, step)


def tensor_parallel(
    setup: Setup, name: str, head: bool = False, whole: bool = False
) -> Contestant:
    """parallelize_module of each block: the normed input is one DTensor, whose gradient
    is summed once.

    head: whether the vocabulary is in parts too, of the embedding, the head and the
    loss. whole: whether the batch is one microbatch.
    """
    model, count = setup.model(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (count,))
    kept = PrepareModuleOutput(
        output_layouts=Replicate(),
        desired_output_layouts=Replicate(),
        use_local_output=False,
    )
    plan: dict[str, ParallelStyle] = {
        **dict.fromkeys(("attention_norm", "feed_norm"), kept),
        **{f"attention.{each}": ColwiseParallel() for each in ("query", "key")},
        **{"attention.value": ColwiseParallel(), "attention.out": RowwiseParallel()},
        **{"feed.0": ColwiseParallel(), "feed.2": RowwiseParallel()},
    }
    for block in model.blocks:
        block.attention.heads //= count
        parallelize_module(block, mesh, plan)
        if setup.compiled:
            block.compile()
    if head:
        logits = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        rows = RowwiseParallel(input_layouts=Replicate())
        parallelize_module(model, mesh, {"head": logits, "tokens": rows})
    pieces = [setup.inputs] if whole else setup.pieces()

    def step() -> None:
        with loss_parallel() if head else nullcontext():
            for piece in pieces:
                (model(*piece) / len(pieces)).backward()

    return Contestant(name, model, step)


RIVALS: Mapping[str, Callable[[Setup], Contestant]] = MappingProxyType(
    {
        "alone": alone,
        "alone-2": lambda setup: alone(setup, 2),
        "torch-ddp": ddp,
        "torch-fsdp": lambda setup: fsdp(setup, "torch-fsdp", reduce_each=True),
        "torch-fsdp-kept": lambda setup: fsdp(
            setup, "torch-fsdp-kept", "microbatch", reduce_each=True
        ),
        "torch-fsdp-late": lambda setup: fsdp(setup, "torch-fsdp-late"),
        "torch-fsdp-gathered": lambda setup: fsdp(setup, "torch-fsdp-gathered", "step"),
        "torch-tp": lambda setup: tensor_parallel(setup, "torch-tp"),
        "torch-tp-whole": lambda setup: tensor_parallel(
            setup, "torch-tp-whole", whole=True
        ),
        "torch-tp-head": lambda setup: tensor_parallel(setup, "torch-tp-head", True),
        "torch-tp-head-whole": lambda setup: tensor_parallel(
            setup, "torch-tp-head-whole", True, True
        ),
    }
)
