"""The device "sim": a PrivateUse1 device in Python.

Its tensors lie in blocks of CPU memory. An operator that is called computes shapes
alone, and a queue computes its values later; see queues.py. Memory is NaN before the
operator that fills it has run, and again once its tensor is gone.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from . import queues

CPU = torch._C.DispatchKey.CPU
aten = torch.ops.aten


class Memory:
    """Blocks of memory; those of gone tensors are poisoned and used again by their
    stream, as those of CUDA's caching allocator are."""

    def __init__(self) -> None:
        self.blocks: dict[int, Tensor] = {}  # by address
        self.live: dict[int, tuple[StorageWeakRef, queues.Stream, int]] = {}
        self.free: dict[tuple[queues.Stream, int], list[int]] = defaultdict(list)
        self.used = self.peak = 0
        self.lock = queues.lock

    def storage(self, size: int) -> torch.UntypedStorage:
        """New memory, poisoned, of the present stream."""
        stream = queues.current_stream()
        size = max(64, -(-size // 64) * 64)
        with self.lock:
            self.collect()
            waiting = self.free[stream, size]
            if waiting:
                address = waiting.pop()
            else:
                block = torch.full((size,), 255, dtype=torch.uint8)
                address = block.data_ptr()
                self.blocks[address] = block
            made = torch._C._construct_storage_from_data_pointer(
                address, torch.device("sim", 0), size
            )
            self.live[address] = StorageWeakRef(made), stream, size
            self.used += size
            self.peak = max(self.peak, self.used)
        return made

    def collect(self) -> None:
        """Takes back the memory of tensors that are gone."""
        gone = [a for a, (alive, _, _) in self.live.items() if alive.expired()]
        for address in gone:
            _, stream, size = self.live.pop(address)
            block = self.blocks[address]
            stream.launch(lambda block=block: block.fill_(255), "free")
            self.free[stream, size].append(address)
            self.used -= size


memory = Memory()


def is_sim(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "sim"


def empty(shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    """A tensor on the device, poisoned."""
    with torch._C._DisableTorchDispatch() if False else torch.no_grad():
        made = torch._C._acc.create_empty_tensor((0,), dtype)
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        size = 0 if 0 in tuple(shape) else extent * dtype.itemsize
        set_ = aten.set_.source_Storage_storage_offset
        return set_._op_dk(CPU, made, memory.storage(size), 0, shape, stride)


def raw(value: Tensor) -> Tensor:
    """A CPU tensor of the same memory."""
    storage = value.untyped_storage()
    host = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), storage.nbytes()
    )
    out = torch.empty(0, dtype=value.dtype)
    return out.set_(host, value.storage_offset(), value.size(), value.stride())


def on_host(value: Any) -> Any:
    """An argument of an operator as it is on the CPU."""
    if is_sim(value):
        return raw(value)
    return torch.device("cpu") if value == torch.device("sim", 0) or (isinstance(value, torch.device) and value.type == "sim") else value


_own = threading.local()


def fake() -> FakeTensorMode:
    """This thread's mode for shapes."""
    if not hasattr(_own, "mode"):
        _own.mode = FakeTensorMode()
    return _own.mode


def faked(value: Any) -> Any:
    if isinstance(value, Tensor):
        with fake():
            return torch.empty_strided(
                value.size(), value.stride(), dtype=value.dtype, device="cpu"
            )
    return torch.device("cpu") if isinstance(value, torch.device) else value


SYNC = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"}


def call(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operator: values later, shapes now."""
    schema = op._schema
    name = schema.name
    flat = [*args, *kwargs.values()]
    if name in ("aten::empty", "aten::empty_strided", "aten::new_empty"):
        meta = op(*tree_map(faked, args), **{**tree_map(faked, kwargs), "device": torch.device("meta")}) if False else None
    returns = [r.alias_info for r in schema.returns]
    writes = [a for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    if any(r is not None for r in returns) and not writes:
        return op._op_dk(CPU, *args, **kwargs)
    if name in SYNC:
        queues.synchronize()
        return op(*tree_map(on_host, args), **tree_map(on_host, kwargs))
    host_args, host_kwargs = tree_map(on_host, (args, kwargs))
    if writes and all(r is not None for r in returns) :
        if op in (aten.resize_.default, aten.set_.source_Storage_storage_offset, aten.set_.source_Tensor):
            return op._op_dk(CPU, *args, **kwargs)
        queues.current_stream().launch(lambda: op(*host_args, **host_kwargs), name)
        names = [a.name for a in schema.arguments]
        given = dict(zip(names, args)) | kwargs
        out = [given[w.name] for w in writes]
        return out[0] if len(schema.returns) == 1 else tuple(out) if schema.returns else None
    with fake():
        shapes = op(*tree_map(faked, args), **tree_map(faked, kwargs))
    wants_host = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
    def made(each: Tensor) -> Tensor:
        return empty(each.size(), each.stride(), each.dtype)
    outs = tree_map_only(Tensor, made, shapes)
    if name in ("aten::empty", "aten::empty_strided", "aten::new_empty", "aten::empty_like", "aten::new_empty_strided"):
        return outs
    hosts = tree_map_only(Tensor, raw, outs)

    def run() -> None:
        found = op(*host_args, **host_kwargs)
        if isinstance(found, Tensor):
            hosts.copy_(found)
        else:
            for to, each in zip(hosts, found, strict=True):
                if isinstance(each, Tensor):
                    to.copy_(each)

    queues.current_stream().launch(run, name)
    return outs


def copy_from(source: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
    """Between host and device, the host waits."""
    if source.device.type == "cpu":
        value = source.clone()
        host = raw(to)
        queues.current_stream().launch(lambda: host.copy_(value), "copy")
    elif to.device.type == "cpu":
        queues.synchronize()
        to.copy_(raw(source))
    else:
        one, other = raw(source), raw(to)
        queues.current_stream().launch(lambda: other.copy_(one), "copy")
    return to


class Module:
    """What torch.sim has."""

    def is_initialized(self) -> bool: return True
    def is_available(self) -> bool: return True
    def current_device(self) -> int: return 0
    def _is_in_bad_fork(self) -> bool: return False
    def manual_seed_all(self, s: int) -> None: pass
    def device_count(self) -> int: return 2
    def set_device(self, d: Any) -> None: pass
    def synchronize(self, d: Any = None) -> None: queues.synchronize()
    def get_rng_state(self, d: Any = None) -> Tensor: return torch.get_rng_state()
    def set_rng_state(self, s: Tensor, d: Any = None) -> None: torch.set_rng_state(s)
    def get_amp_supported_dtype(self): return [torch.float16, torch.bfloat16]


_kept = []


def register() -> None:
    """Makes the device known, for this process."""
    if _kept:
        return
    _setup_privateuseone_for_python_backend("sim", Module())
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(call, "PrivateUse1")
    own = torch.library.Library("aten", "IMPL")
    own.impl("_copy_from", copy_from, "PrivateUse1")
    _kept.extend([everything, own])
