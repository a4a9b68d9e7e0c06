"""How workers hand values to each other: between threads, or over torch.distributed.

The only file that knows torch.distributed. Both kinds of endpoint have the same four
methods: send never waits; expect says early what will come; take waits for it; watch
puts its tag in a queue once it is there.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .jobs import PlanError
from .neighbours import Neighbour, Neighbours
from .parcels import Parcel

T = TypeVar("T")

TRANSPORTS = ("threads", "distributed", "gloo")
WATCHERS = 8  # receives that may be posted at a time under order="dynamic"


class Aborted(Exception):
    """Another worker failed; this one stops waiting for it."""


class Endpoint(Protocol):
    """One worker's end of the transfers of one run."""

    def send(self, value: Any, parcel: Parcel) -> None: ...
    def expect(self, parcel: Parcel) -> None: ...
    def take(self, parcel: Parcel) -> Any: ...
    def watch(self, parcel: Parcel, arrived: queue.SimpleQueue[int]) -> None: ...
    def finish(self) -> None: ...


class Exchange:
    """Values on their way between the threads of one run, by reference."""

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self.watching: dict[int, queue.SimpleQueue[int]] = {}
        self.changed = threading.Condition()
        self.failed = False
        self.queues: list[queue.SimpleQueue[int]] = []

    def abort(self) -> None:
        """Wakes every worker that waits, to raise Aborted."""
        with self.changed:
            self.failed = True
            self.changed.notify_all()
            for waiting in self.queues:
                waiting.put(-1)


class ThreadEndpoint:
    """An endpoint between threads of one process."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def send(self, value: Any, parcel: Parcel) -> None:
        tag = parcel.tag
        with self.exchange.changed:
            self.exchange.values[tag] = value
            if tag in self.exchange.watching:
                self.exchange.watching.pop(tag).put(tag)
            self.exchange.changed.notify_all()

    def expect(self, parcel: Parcel) -> None:
        pass

    def take(self, parcel: Parcel) -> Any:
        with self.exchange.changed:
            while parcel.tag not in self.exchange.values:
                if self.exchange.failed:
                    raise Aborted
                self.exchange.changed.wait()
            return self.exchange.values.pop(parcel.tag)

    def watch(self, parcel: Parcel, arrived: queue.SimpleQueue[int]) -> None:
        tag = parcel.tag
        with self.exchange.changed:
            if arrived not in self.exchange.queues:
                self.exchange.queues.append(arrived)
            if self.exchange.failed:
                arrived.put(-1)
            elif tag in self.exchange.values:
                arrived.put(tag)
            else:
                self.exchange.watching[tag] = arrived

    def finish(self) -> None:
        pass


class ProcessEndpoint:
    """An endpoint of a rank: through shared memory to ranks of the same host, else over
    torch.distributed, where tensors on a GPU go through host memory.

    Weights go over torch.distributed everywhere: such a send waits, without holding up
    the program or copying large weights, until the receiver has room for them.
    """

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.sending: list[tuple[dist.Work, Tensor]] = []
        self.coming: dict[int, tuple[list[dist.Work], list[Tensor]]] = {}

    def _near(self, parcel: Parcel) -> Neighbour | None:
        """The neighbour that a parcel goes to or comes from, if it goes this way."""
        return None if parcel.weights else self.processes.neighbours.get(parcel.peer)

    def send(self, value: Any, parcel: Parcel) -> None:
        if (near := self._near(parcel)) is not None:
            near.send(value, parcel)
            return
        given = value if parcel.bundle else (value,)
        buffers = [given[i].contiguous().resolve_neg() for i in parcel.alone]
        rest = [t for i, t in enumerate(given) if i not in parcel.alone]
        if rest or not buffers:
            buffer = torch.empty(max(1, parcel.rest.bytes), dtype=torch.uint8)
            parcel.rest.write(parcel.rest.views(buffer), rest)
            buffers.append(buffer)
        for buffer in buffers:
            work = dist.isend(
                buffer, parcel.peer, group=self.processes.group, tag=parcel.tag
            )
            assert work is not None
            self.sending.append((work, buffer))

    def expect(self, parcel: Parcel) -> None:
        if self._near(parcel) is not None:
            return
        buffers = [parcel.specs[i].empty() for i in parcel.alone]
        if len(parcel.alone) < len(parcel.specs) or not buffers:
            buffers.append(torch.empty(max(1, parcel.rest.bytes), dtype=torch.uint8))
        works = []
        for buffer in buffers:
            work = dist.irecv(
                buffer, parcel.peer, group=self.processes.group, tag=parcel.tag
            )
            assert work is not None
            works.append(work)
        self.coming[parcel.tag] = (works, buffers)

    def take(self, parcel: Parcel) -> Any:
        if (near := self._near(parcel)) is not None:
            return near.take(parcel)
        works, buffers = self.coming.pop(parcel.tag)
        for work in works:
            work.wait()
        if not parcel.bundle and parcel.alone:
            return buffers[0]
        rest = iter(parcel.rest.read(parcel.rest.views(buffers[-1])))
        alone = dict(zip(parcel.alone, buffers, strict=False))
        found = [
            alone[i] if i in alone else next(rest) for i in range(len(parcel.specs))
        ]
        return tuple(found) if parcel.bundle else found[0]

    def watch(self, parcel: Parcel, arrived: queue.SimpleQueue[int]) -> None:
        tag = parcel.tag
        if (near := self._near(parcel)) is not None:
            near.watch(tag, arrived)
            return
        works, buffers = self.coming[tag]
        self.coming[tag] = ([], buffers)
        del buffers

        def wait() -> None:  # keeps no hold of the buffers once they have come
            try:
                while works:
                    works[0].wait()
                    del works[0]
            except RuntimeError:  # the peer is gone: wake the worker to fail
                self.coming[tag] = (works, self.coming[tag][1])
            arrived.put(tag)

        self.processes.call(wait)

    def finish(self) -> None:
        for work, _ in self.sending:
            work.wait()
        self.sending.clear()


class Processes:
    """This process as one of the workers of a torch.distributed job.

    near: whether ranks of the same host hand values over through shared memory.
    """

    def __init__(self, workers: int, near: bool = True) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        check_world(workers, dist.get_world_size())
        self.group = dist.new_group(backend="gloo")
        self.rank, self.workers = dist.get_rank(), workers
        self.process = os.getpid()
        self.neighbours: Mapping[int, Neighbour] = {}
        if near:
            self.neighbours = Neighbours(self.rank, self.all)
        self.waits: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.threads = self.waiting = 0
        self.changed = threading.Lock()

    def call(self, wait: Callable[[], None]) -> None:
        """Calls what waits for something, in a thread that nothing else waits in."""
        with self.changed:
            self.waiting += 1
            if self.waiting > self.threads:  # a daemon: a rank that fails exits anyway
                self.threads += 1
                threading.Thread(target=self._call, daemon=True).start()
        self.waits.put(wait)

    def _call(self) -> None:
        while True:
            self.waits.get()()
            with self.changed:
                self.waiting -= 1

    def endpoint(self) -> ProcessEndpoint:
        if os.getpid() != self.process:
            raise PlanError(
                "this process was forked from a rank and is none itself; call the "
                "compiled model in the rank"
            )
        return ProcessEndpoint(self)

    def share(self, tensor: Tensor, source: int, to: Sequence[int]) -> None:
        """Copies a tensor from one rank to others; every rank calls it alike."""
        if self.rank == source:
            host = tensor.detach().cpu().contiguous()
            for rank in to:
                if rank != source:
                    dist.send(host, rank, group=self.group)
        elif self.rank in to:
            host = torch.empty(tensor.shape, dtype=tensor.dtype)
            dist.recv(host, source, group=self.group)
            with torch.no_grad():
                tensor.copy_(host)

    def first(self, value: Any) -> Any:
        """Rank 0's value of a small object."""
        values = [value]
        dist.broadcast_object_list(values, 0, group=self.group)
        return values[0]

    def all(self, value: Any) -> list[Any]:
        """Every rank's value of a small object."""
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, call: str, value: Any) -> list[Any]:
        """Every rank's value, where all ranks make the same call.

        Raises PlanError on every rank if one makes another.
        """
        calls, values = zip(*self.all((call, value)), strict=True)
        for rank, other in enumerate(calls):
            if other != calls[0]:
                raise PlanError(
                    f"rank {rank} calls {other}, but rank 0 calls {calls[0]}; every "
                    "rank must call it, with the same model and arguments"
                )
        return list(values)


_everyone: tuple[Any, Processes] | None = None


def everyone() -> Processes:
    """All ranks, for calls that are no part of a step. Every rank makes its first call
    of it at the same point, for that makes a process group."""
    global _everyone
    if _everyone is None or _everyone[0] is not dist.group.WORLD:
        processes = Processes(dist.get_world_size(), near=False)
        _everyone = dist.group.WORLD, processes
    return _everyone[1]


def from_rank_0(make: Callable[[], T]) -> T:
    """What make() gives on rank 0, or here if there are no ranks; its errors too.

    All ranks run it at the same time, so that what it measures is as slow as in a step,
    where all are busy.
    """
    if not dist.is_initialized():
        if not started_by_torchrun():
            return make()
        dist.init_process_group("gloo")
    found: list[Any] = [None, None]
    dist.barrier()
    try:
        found[0] = make()
    except Exception as error:
        found[1] = error
    dist.broadcast_object_list(found, 0)
    if found[1] is not None:
        raise found[1]
    made: T = found[0]
    return made


def largest(values: Tensor) -> Tensor:
    """The largest of each value over all ranks; the values themselves on threads."""
    if dist.is_initialized():
        dist.all_reduce(values, dist.ReduceOp.MAX)
    return values


def leave() -> None:
    """Ends this process's part in a torch.distributed job, if it is in one."""
    global _everyone
    if dist.is_initialized():
        _everyone = None
        dist.destroy_process_group()


def started_by_torchrun() -> bool:
    return dist.is_torchelastic_launched() or {"RANK", "WORLD_SIZE"} <= set(os.environ)


def choose(transport: str | None, workers: int) -> str:
    """One of TRANSPORTS. Raises PlanError if the world has another size."""
    if transport == "threads":
        return transport
    if dist.is_initialized():
        check_world(workers, dist.get_world_size())
        return transport or "distributed"
    if started_by_torchrun():
        check_world(workers, int(os.environ["WORLD_SIZE"]))
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
    if size != workers:
        raise PlanError(
            f"the schedule has {workers} workers, but torch.distributed runs {size} "
            f"processes; start {workers} (torchrun --nproc-per-node {workers}), give "
            "the schedule as many workers, or use transport='threads'"
        )
