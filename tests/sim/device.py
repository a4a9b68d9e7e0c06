"""The device "sim": a PrivateUse1 device in Python.

Its tensors lie in blocks of CPU memory. An operator that is called computes shapes
alone, and a queue computes its values later; see queues.py. Memory is NaN before the
operator that fills it has run, and again once its tensor is gone.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from . import queues

CPU = torch._C.DispatchKey.CPU  # whose kernels of views and of set_ look at shapes only
POISON = 255  # each byte; NaN, -1 or True
aten = torch.ops.aten
Lot = tuple[object, int]  # the stream or pool whose memory it is, and a size


class Memory:
    """Blocks of memory; those of gone tensors are poisoned and used again by their
    stream, as those of CUDA's caching allocator are.

    used, peak: bytes of tensors, by worker.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, Tensor] = {}  # by address
        self.live: dict[int, tuple[StorageWeakRef, queues.Stream, Lot]] = {}
        self.free: dict[Lot, list[int]] = defaultdict(list)
        self.used: Counter[int | None] = Counter()
        self.peak: Counter[int | None] = Counter()
        self.before: set[int] = set()  # addresses that aren't counted

    def storage(self, size: int) -> torch.UntypedStorage:
        """New memory, poisoned, of the present stream or its capture's pool."""
        stream, size = queues.current_stream(), max(64, -(-size // 64) * 64)
        with queues.lock:
            self.collect()
            lot: Lot = (stream if stream.captured is None else stream.pool), size
            waiting = self.free[lot]
            if waiting:
                address = waiting.pop()
            else:
                block = torch.full((size,), POISON, dtype=torch.uint8)
                address = block.data_ptr()
                self.blocks[address] = block
            made = torch._C._construct_storage_from_data_pointer(
                address, torch.device("sim", 0), size
            )
            self.live[address] = StorageWeakRef(made), stream, lot
            worker = stream.worker
            self.used[worker] += size
            self.peak[worker] = max(self.peak[worker], self.used[worker])
        return made

    def collect(self) -> None:
        """Takes back the memory of tensors that are gone."""
        with queues.lock:
            gone = [a for a, (alive, _, _) in self.live.items() if alive.expired()]
            for address in gone:
                _, stream, lot = self.live.pop(address)
                block = self.blocks[address]
                stream.put(queues.Item("free", lambda block=block: block.fill_(POISON)))
                self.free[lot].append(address)
                self.used[stream.worker] -= lot[1] * (address not in self.before)
                self.before.discard(address)

    def restart(self) -> None:
        """Counts what is new from now on, and its peak."""
        self.collect()
        self.before = set(self.live)
        self.used.clear()
        self.peak.clear()


memory = Memory()
_own = threading.local()


def _shapes() -> FakeTensorMode:
    """This thread's mode, in which operators compute shapes."""
    if not hasattr(_own, "shapes"):
        _own.shapes = FakeTensorMode()
    return _own.shapes


def _fill(tensor: Tensor, like: Tensor) -> Tensor:
    """Gives a tensor new memory, of the shape of another."""
    shape, stride = like.size(), like.stride()
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    storage = memory.storage(0 if 0 in shape else extent * like.dtype.itemsize)
    set_ = aten.set_.source_Storage_storage_offset
    return set_._op_dk(CPU, tensor, storage, 0, shape, stride)


def _empty(like: Tensor) -> Tensor:
    return _fill(torch._C._acc.create_empty_tensor((0,), like.dtype), like)


def raw(value: Tensor) -> Tensor:
    """A CPU tensor of the same memory."""
    storage = value.untyped_storage()
    host = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), storage.nbytes()
    )
    place = value.storage_offset(), value.size(), value.stride()
    return torch.empty(0, dtype=value.dtype).set_(host, *place)


def _on_host(value: Any) -> Any:
    """An argument as the CPU's kernel gets it."""
    if isinstance(value, Tensor) and value.device.type == "sim":
        return raw(value)
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _faked(value: Any) -> Any:
    """An argument as it is without values."""
    if isinstance(value, Tensor):
        size, stride = value.size(), value.stride()
        return torch.empty_strided(size, stride, dtype=value.dtype, device="cpu")
    return torch.device("cpu") if isinstance(value, torch.device) else value


READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default}
MEMORY = {aten.resize_.default, aten.set_.source_Tensor}
MEMORY |= {aten.set_.source_Storage_storage_offset, aten.set_.source_Storage}
ALLOCATES = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}


def call(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operator: shapes now, values later."""
    schema, name = op._schema, op._schema.name.removeprefix("aten::")
    written = [a for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    views = any(each.alias_info is not None for each in schema.returns)
    if op in MEMORY or (views and not written):
        return op._op_dk(CPU, *args, **kwargs)
    if op in READS:
        queues.synchronize()
        found = op(*tree_map(_on_host, args), **tree_map(_on_host, kwargs))
        return tree_map_only(Tensor, lambda each: _copied(each), found)
    with _shapes():
        made = op(*tree_map(_faked, args), **tree_map(_faked, kwargs))
    stream = queues.current_stream()
    if written:
        names = [each.name for each in schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        outs = [given[each.name] for each in written]
        if "out" in op._overloadname:
            for out, like in zip(outs, _flat(made), strict=True):
                if out.size() != like.size():
                    _fill(out, like)
        own, named = tree_map(_on_host, (args, kwargs))
        reads = [v for k, v in given.items() if k not in {w.name for w in written}]
        stream.launch(lambda: op(*own, **named), name, tree_map(_on_host, reads))
        if not schema.returns:
            return None
        return outs[0] if len(schema.returns) == 1 else tuple(outs)
    outs = tree_map_only(Tensor, _empty, made)
    if name in ALLOCATES:
        return outs
    own, named = tree_map(_on_host, (args, kwargs))
    hosts = [raw(each) for each in _flat(outs)]

    def run() -> None:
        for to, each in zip(hosts, _flat(op(*own, **named)), strict=True):
            to.copy_(each)

    stream.launch(run, name, [*own, *named.values()])
    return outs


def _flat(value: Any) -> list[Tensor]:
    found = [value] if isinstance(value, Tensor) else list(value or ())
    return [each for each in found if isinstance(each, Tensor)]


def _copied(value: Tensor) -> Tensor:
    out = _empty(value)
    raw(out).copy_(value)
    return out


def _copy_from(source: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
    """Where a copy goes to the host, the host waits."""
    stream = queues.current_stream()
    if to.device.type == "cpu":
        queues.synchronize(stream.mark())
        to.copy_(raw(source))
        return to
    value = source.clone() if source.device.type == "cpu" else raw(source)
    own = raw(to)
    stream.launch(lambda: own.copy_(value), "copy_", [value])
    return to


class Event:
    """A mark of a stream, with the time at which its queue comes to it."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.time = 0.0
        self.item: queues.Item | None = None

    def record(self, stream: queues.Stream | None = None) -> None:
        stream = stream or queues.current_stream()
        self.item = stream.put(queues.Item("event", self._note))

    def _note(self) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        queues.synchronize(self.item)

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.time - self.time)


class Graph:
    """What a stream was given in a capture, to be launched again by each replay."""

    replays = 0  # of all

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        memory.collect()
        self.stream = queues.current_stream()
        self.items: list[queues.Item] = []
        self.stream.captured, self.stream.pool = self.items, pool

    def capture_end(self) -> None:
        memory.collect()
        self.stream.captured = None

    def replay(self) -> None:
        Graph.replays += 1
        for item in self.items:
            queues.current_stream().put(queues.Item(item.name, item.run))


class Module:
    """What torch.sim has."""

    Event, stream = Event, staticmethod(queues.on_stream)
    CUDAGraph, graph_pool_handle = Graph, object
    Stream = staticmethod(queues.new_stream)

    def current_stream(self, device: Any = None) -> queues.Stream:
        return queues.current_stream()

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 2

    def set_device(self, device: Any) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        queues.synchronize()

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> Sequence[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def _is_in_bad_fork(self) -> bool:
        return False


def _register() -> list[torch.library.Library]:
    """Makes the device known, for this process."""
    _setup_privateuseone_for_python_backend("sim", Module())
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(call, "PrivateUse1")
    own = torch.library.Library("aten", "IMPL")
    own.impl("_copy_from", _copy_from, "PrivateUse1")
    return [everything, own]


_kept = _register()
DEVICE = torch.device("sim", 0)
