"""How workers hand values to each other: between threads, or over torch.distributed.

The only file that knows torch.distributed. Both kinds of endpoint have the same four
methods: send never waits; expect says early what will come; take waits for it; watch
puts its tag in a queue once it is there.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .graphs import Spec, Specs
from .jobs import PlanError

T = TypeVar("T")

ALIGNMENT = 64  # bytes between tensors of a bundle in one message
WATCHERS = 8  # receives that may be posted at a time under order="dynamic"


class Aborted(Exception):
    """Another worker failed; this one stops waiting for it."""


class Endpoint(Protocol):
    """One worker's end of the transfers of one run."""

    def send(self, value: Any, to: int, tag: int) -> None: ...
    def expect(self, source: int, tag: int, specs: Specs, bundle: bool) -> None: ...
    def take(self, tag: int) -> Any: ...
    def watch(self, tag: int, arrived: queue.SimpleQueue[int]) -> None: ...
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

    def send(self, value: Any, to: int, tag: int) -> None:
        with self.exchange.changed:
            self.exchange.values[tag] = value
            if tag in self.exchange.watching:
                self.exchange.watching.pop(tag).put(tag)
            self.exchange.changed.notify_all()

    def expect(self, source: int, tag: int, specs: Specs, bundle: bool) -> None:
        pass

    def take(self, tag: int) -> Any:
        with self.exchange.changed:
            while tag not in self.exchange.values:
                if self.exchange.failed:
                    raise Aborted
                self.exchange.changed.wait()
            return self.exchange.values.pop(tag)

    def watch(self, tag: int, arrived: queue.SimpleQueue[int]) -> None:
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
    """An endpoint over torch.distributed; tensors on a GPU go through host memory."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.sending: list[tuple[dist.Work, Tensor]] = []
        self.coming: dict[int, tuple[dist.Work | None, Tensor, Specs, bool]] = {}

    def send(self, value: Any, to: int, tag: int) -> None:
        buffer = value if _is_plain(value) else pack(value)
        if buffer.numel():
            work = dist.isend(buffer, to, group=self.processes.group, tag=tag)
            assert work is not None
            self.sending.append((work, buffer))

    def expect(self, source: int, tag: int, specs: Specs, bundle: bool) -> None:
        if not bundle and self.processes.comes_plain(specs):
            buffer = specs[0].empty()
        else:
            buffer = torch.empty(packed_bytes(specs), dtype=torch.uint8)
        work = None
        if buffer.numel():
            work = dist.irecv(buffer, source, group=self.processes.group, tag=tag)
        self.coming[tag] = (work, buffer, specs, bundle)

    def take(self, tag: int) -> Any:
        work, buffer, specs, bundle = self.coming.pop(tag)
        if work is not None:
            work.wait()
        if not bundle and self.processes.comes_plain(specs):
            return buffer
        return unpack(buffer, specs, bundle)

    def watch(self, tag: int, arrived: queue.SimpleQueue[int]) -> None:
        work, *rest = self.coming[tag]
        self.coming[tag] = (None, *rest)  # type: ignore[assignment]

        def wait() -> None:
            try:
                if work is not None:
                    work.wait()
                arrived.put(tag)
            except RuntimeError:  # the peer is gone: wake the worker to fail
                self.coming[tag] = (work, *rest)  # type: ignore[assignment]
                arrived.put(tag)

        self.processes.watchers.put(wait)

    def finish(self) -> None:
        for work, _ in self.sending:
            work.wait()
        self.sending.clear()


class Processes:
    """This process as one of the workers of a torch.distributed job."""

    def __init__(self, workers: int) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        check_world(workers, dist.get_world_size())
        self.group = dist.new_group(backend="gloo")
        self.rank = dist.get_rank()
        self.plain: dict[int, tuple[Specs, bool]] = {}  # by id, specs kept alive
        self.watchers: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        for _ in range(WATCHERS):  # daemons: a rank that fails exits though they wait
            threading.Thread(target=self._watch, daemon=True).start()

    def comes_plain(self, specs: Specs) -> bool:
        """Whether a value arrives as it is wanted: a contiguous tensor on the CPU."""
        known = self.plain.get(id(specs))
        if known is None:
            (spec,) = specs
            empty = spec.empty()
            known = self.plain[id(specs)] = (specs, _is_plain(empty))
        return known[1]

    def _watch(self) -> None:
        while True:
            self.watchers.get()()

    def endpoint(self) -> ProcessEndpoint:
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
    if dist.is_initialized():
        dist.destroy_process_group()


def started_by_torchrun() -> bool:
    return dist.is_torchelastic_launched() or {"RANK", "WORLD_SIZE"} <= set(os.environ)


def choose(transport: str | None, workers: int) -> str:
    """ "threads" or "distributed". Raises PlanError if the world has another size."""
    if transport not in (None, "threads", "distributed"):
        raise PlanError(
            f"transport={transport!r}: give 'threads', 'distributed' or None"
        )
    if transport == "threads":
        return transport
    if dist.is_initialized():
        check_world(workers, dist.get_world_size())
        return "distributed"
    if started_by_torchrun():
        check_world(workers, int(os.environ["WORLD_SIZE"]))
        return "distributed"
    if transport == "distributed":
        raise PlanError(
            "transport='distributed' needs a process group: start with "
            f"torchrun --nproc-per-node {workers}, or call "
            "torch.distributed.init_process_group first"
        )
    return "threads"


def check_world(workers: int, size: int) -> None:
    if size != workers:
        raise PlanError(
            f"the schedule has {workers} workers, but torch.distributed runs {size} "
            f"processes; start {workers} (torchrun --nproc-per-node {workers}), give "
            "the schedule as many workers, or use transport='threads'"
        )


def _is_plain(value: Any) -> bool:
    """Whether a tensor's memory is just what is sent of it."""
    return (
        isinstance(value, Tensor)
        and value.is_contiguous()
        and value.device.type == "cpu"
        and not value.is_complex()
    )


def pack(value: Any) -> Tensor:
    """A tensor or a bundle as bytes in host memory.

    A contiguous tensor is not copied. Dimensions that only repeat (stride 0) are sent
    once.
    """
    given = [value] if isinstance(value, Tensor) else list(value)
    flat = [_once(t.detach()).cpu().resolve_conj().resolve_neg() for t in given]
    parts = [t.contiguous().view(-1).view(torch.uint8) for t in flat]
    if len(parts) == 1:
        return parts[0]
    buffer = torch.empty(sum(_aligned(p.numel()) for p in parts), dtype=torch.uint8)
    offset = 0
    for part in parts:
        buffer[offset : offset + part.numel()] = part
        offset += _aligned(part.numel())
    return buffer


def packed_bytes(specs: Specs) -> int:
    """How long pack makes a value with these shapes."""
    sizes = [_sent(spec).bytes for spec in specs]
    return sizes[0] if len(sizes) == 1 else sum(map(_aligned, sizes))


def unpack(buffer: Tensor, specs: Specs, bundle: bool) -> Any:
    """The tensor or bundle that pack made bytes of, with the strides it had."""
    result = []
    offset = 0
    for spec in specs:
        sent = _sent(spec)
        size = sent.bytes
        part = buffer[offset : offset + size].view(spec.dtype).view(sent.shape)
        part = part.to(spec.device)
        if sent.shape != spec.shape:
            part = part.expand(spec.shape)
        elif part.stride() != spec.stride and not _overlaps(spec):
            part = spec.empty().copy_(part)
        result.append(part)
        offset += _aligned(size)
    return tuple(result) if bundle else result[0]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _once(tensor: Tensor) -> Tensor:
    for dim, (size, stride) in enumerate(
        zip(tensor.shape, tensor.stride(), strict=True)
    ):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return (
        tensor.clone(memory_format=torch.contiguous_format)
        if 0 in tensor.stride()
        else tensor
    )


def _sent(spec: Spec) -> Spec:
    """A spec as it is sent: contiguous, what only repeats once."""
    shape = tuple(
        1 if stride == 0 and size > 1 else size
        for size, stride in zip(spec.shape, spec.stride, strict=True)
    )
    return spec._replace(shape=shape)


def _overlaps(spec: Spec) -> bool:
    """Whether several indices name one place in memory, so that it can't be filled."""
    reach = sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True))
    return 0 not in spec.shape and reach + 1 < spec.bytes // spec.dtype.itemsize
