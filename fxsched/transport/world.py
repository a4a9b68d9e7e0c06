"""The ranks of a job: whether there are any, how many, and what all agree on.

Knows torch.distributed's default process group, and torchrun's environment.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from ..ir.request import Transport
from ..jobs.job import PlanError

T = TypeVar("T")
PATIENCE = 2.0  # seconds for torchrun's store, once an error ends a rank


def from_rank_0(make: Callable[[], T]) -> T:
    """What make() gives on rank 0, or here if there are no ranks; its errors too.

    All ranks run it at the same time, so that what it measures is as slow as in a step,
    where all are busy.
    """
    if not dist.is_initialized():
        if not started_by_torchrun():
            return make()
        start_group()
    outcome: list[Any] = [None, None]
    dist.barrier()
    try:
        outcome[0] = make()
    except Exception as error:
        outcome[1] = _sendable(error)
    dist.broadcast_object_list(outcome, 0)
    if outcome[1] is not None:
        raise outcome[1]
    value: T = outcome[0]
    return value


def _sendable(error: Exception) -> Exception:
    """The error, or its text where another rank could not unpickle it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return PlanError(f"{type(error).__name__}: {error}")
    return error


def largest(values: Tensor) -> Tensor:
    """The largest of each value over all ranks; the values themselves on threads."""
    if not dist.is_initialized():
        return values
    sent = values.to(group_device())
    dist.all_reduce(sent, dist.ReduceOp.MAX)
    return sent.to(values.device)


def group_device() -> torch.device:
    """The device whose tensors the default group sends: the CPU, if it can, as it does
    not with nccl alone."""
    kinds = [each.partition(":")[0] for each in dist.get_backend_config().split(",")]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])


def start_group() -> None:
    """Makes torch.distributed's default group, of gloo, as torchrun says.

    After `torchrun --max-restarts`, under names of this attempt: the store is often the
    agent's, which has the addresses of processes of the attempt before (PyTorch 2.13
    takes it for a new one), and gloo would connect to these.
    """
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not attempt:
        dist.init_process_group("gloo")
        return
    store, rank, ranks = next(rendezvous("env://"))
    own = c10d.PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=ranks)


def are_ranks() -> bool:
    """Whether this process is one of several that a process group connects."""
    return dist.is_initialized() and dist.get_world_size() > 1


def started_by_torchrun() -> bool:
    """Whether this process is a rank of torchrun's."""
    return dist.is_torchelastic_launched() or {"RANK", "WORLD_SIZE"} <= set(os.environ)


IN_PROCESS = ("threads", "strict")  # transports without other processes


def choose(transport: Transport | None, workers: int) -> Transport:
    """The transport to take. Raises PlanError if the world has another size."""
    if transport in IN_PROCESS:
        return transport
    initialized = dist.is_initialized()
    if initialized or started_by_torchrun():
        size = dist.get_world_size() if initialized else os.environ["WORLD_SIZE"]
        check_world(workers, int(size))
        return transport or "distributed"
    if transport is not None:
        raise PlanError(
            f"transport={transport!r} needs a process group: start with "
            f"torchrun --nproc-per-node {workers}, or call "
            "torch.distributed.init_process_group first"
        )
    return "threads"


def own_rank() -> int | None:
    """This process's rank; None where it runs all workers."""
    if dist.is_initialized():
        return dist.get_rank()
    return int(os.environ["RANK"]) if started_by_torchrun() else None


def check_world(workers: int, size: int) -> None:
    """Raises PlanError unless there is a process for each worker."""
    if size != workers:
        raise PlanError(
            f"the schedule has {workers} workers, but torch.distributed runs {size} "
            f"processes; start {workers} (torchrun --nproc-per-node {workers}), give "
            "the schedule as many workers, or use transport='threads'"
        )


def default_timeout() -> float:
    """Seconds that the process group waits at most."""
    try:
        world: Any = dist.group.WORLD
        options = world._get_backend(group_device()).options
        return float(options._timeout.total_seconds())
    except (AttributeError, RuntimeError):  # a backend without options
        return float(c10d.default_pg_timeout.total_seconds())


def tell_error(text: str) -> None:
    """Tells the other ranks of torchrun the error that ends rank 0."""
    with suppress(RuntimeError):  # of a store that has gone, or isn't there
        store, key = _torchrun_store()
        store.set(key, text)


def error_of_rank_0() -> str | None:
    """The error that ends rank 0; None if it tells of none within PATIENCE."""
    with suppress(RuntimeError):
        store, key = _torchrun_store()
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:  # its own wait warns when the time is over
            if store.check([key]):
                return str(store.get(key).decode())
            time.sleep(PATIENCE / 20)
    return None


def _torchrun_store() -> tuple[Any, str]:
    """That of torchrun's own process, which outlives ranks, and a key of this attempt.
    Raises RuntimeError if there is none."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise RuntimeError("the store is of rank 0, or of no rank")
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    make: Any = getattr(dist, "TCPStore")  # noqa: B009  # which its types leave out
    store = make(*where, is_master=False, timeout=timedelta(seconds=PATIENCE))
    return store, f"fxsched error {os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
