"""How ranks hand values to each other: over torch.distributed, or shared memory.

The only file that sends and receives over torch.distributed. A message's number says
which call of which plan it is of (see control.py), so that no other can be taken. What
waits inside it is looked after by a thread: if in vain, it breaks the connections,
which wakes this rank and all that wait for it. Processes.reset makes new ones.
"""

from __future__ import annotations

import atexit
import functools
import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from ..ir.step import Way
from ..jobs.job import PlanError
from .board import TICK, Mark
from .control import SAME, Control
from .device_groups import DeviceGroups
from .endpoints import Where
from .helper_threads import Helpers
from .host_links import host_name
from .lane import Lane
from .ordered import OrderedEndpoint
from .shared_memory import Neighbour, Neighbours
from .wire_format import AllReduce, Parcel
from .world import check_world, default_timeout, start_group

HOST = torch.device("cpu")
WATCHERS = 8  # receives that may be posted at a time under order="dynamic"
TAGS = 2**31 - 2  # of torch.distributed; the last two are SHARED and BROKEN
SHARED, BROKEN = TAGS, TAGS + 1
MESSAGES = 1 << 20  # of a step, which leaves tags for that of 2,047 calls
_groups = [0]  # the number of the next; every rank makes the same ones


class ProcessEndpoint:
    """An endpoint of a rank: through shared memory to ranks of the same host, else over
    torch.distributed, where tensors on a GPU go through host memory. Weights wait on
    both ways, without holding up the program, until the receiver has room for them.
    Among more than two ranks they go over torch.distributed: while a rank waits for
    one of them, it would not see that another has room.
    """

    def __init__(self, processes: Processes, mark: Mark) -> None:
        self.processes, self.mark = processes, mark
        slots = TAGS // MESSAGES
        self.first = (mark.call + 97 * mark.plan + mark.inputs) % slots * MESSAGES
        self.coming: dict[int, tuple[list[dist.Work], list[Tensor]]] = {}
        # what is on its way, by peer; apart: weights, which may wait for long
        self.leaving: dict[tuple[int, bool], Lane] = {}
        self.where: Callable[[], str] = lambda: ""  # the job that the run is at

    def _near(self, parcel: Parcel) -> Neighbour | None:
        """The neighbour that a parcel goes to or comes from, if it goes this way."""
        if parcel.weights and self.processes.workers > 2:
            return None
        return self.processes.neighbours.get(parcel.peer)

    def send(self, value: Any, parcel: Parcel) -> None:
        if (near := self._near(parcel)) is not None:
            near.send(value, parcel, self.mark)
            return
        for buffer in parcel.buffers(value, HOST):
            work = self.processes.post(
                dist.isend, buffer, parcel.peer, self._tag(parcel)
            )
            way = parcel.peer, parcel.weights
            if way not in self.leaving:
                self.leaving[way] = Lane(helpers=self.processes.helpers)
            self.leaving[way].call("", _left, work, buffer)

    def expect(self, parcel: Parcel) -> None:
        if (near := self._near(parcel)) is not None:
            near.expect(parcel, self.mark)
            return
        buffers, tag = parcel.empty(HOST), self._tag(parcel)
        post = self.processes.post
        works = [post(dist.irecv, buffer, parcel.peer, tag) for buffer in buffers]
        self.coming[parcel.tag] = (works, buffers)

    def _tag(self, parcel: Parcel) -> int:
        return self.first + parcel.tag

    def take(self, parcel: Parcel) -> Any:
        if (near := self._near(parcel)) is not None:
            return near.take(parcel, self.mark, self.where)
        works, buffers = self.coming.pop(parcel.tag)
        if works:
            with self.processes.waiting(parcel.peer, self.mark, self.where):
                for work in works:
                    work.wait()
        return parcel.value(buffers)

    def watch(self, parcel: Parcel, arrived: queue.SimpleQueue[int]) -> None:
        tag = parcel.tag
        if (near := self._near(parcel)) is not None:
            near.watch(tag, arrived, self.mark)
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

        self.processes.helpers.call(wait)

    def next(self, arrived: queue.SimpleQueue[int], where: Where) -> int:
        return self.processes.control.next(arrived, self.mark, where)

    def finish(self) -> None:
        for near in self.processes.neighbours.values():
            near.finish(self.mark, self.where)
        for (peer, _), leaving in self.leaving.items():
            with self.processes.waiting(peer, self.mark, self.where):
                leaving.finish()

    def share(self) -> None:
        for near in self.processes.neighbours.values():
            near.start_reader()

    def fail(self, error: BaseException) -> None:
        self.processes.fail(error)


class DeviceEndpoint(OrderedEndpoint):
    """An endpoint of a rank whose messages go from device to device."""

    def __init__(self, processes: Processes, groups: DeviceGroups, mark: Mark) -> None:
        ways = groups.connection, groups.meeting
        super().__init__(processes.rank, groups.device, *ways)
        self.processes, self.mark = processes, mark
        self.where: Callable[[], str] = lambda: ""  # the job that the run is at
        # where the device waits: an event, for which rank, and in which job
        self.awaited: list[tuple[Any, int | None, str]] = []

    def take(self, parcel: Parcel | AllReduce) -> Any:
        with self.processes.waiting(parcel.peer, self.mark, self.where):
            value = super().take(parcel)
        if self.device.type != "cpu":  # a work would keep the memory of the message
            module: Any = torch.get_device_module(self.device)
            event = module.Event()
            event.record()
            self.awaited.append((event, parcel.peer, self.where()))
        return value

    def finish(self) -> None:
        """Has a thread look after what the device still waits for."""
        with self.processes.waiting(None, self.mark, self.where):
            super().finish()
        late = [each for each in self.awaited if not each[0].query()]
        self.awaited = []
        if late:
            self.processes.helpers.call(
                partial(self.processes.await_all, late, self.mark)
            )

    def fail(self, error: BaseException) -> None:
        self.processes.fail(error)


def _left(work: dist.Work, buffer: Tensor) -> None:
    """Waits until a send has left, whose buffer is kept until then: works of
    torch.distributed can't be asked whether they are done."""
    work.wait()


@dataclass(eq=False)
class Wait:
    """A wait inside torch.distributed: for whom, at which call, since when."""

    rank: int | None
    mark: Mark | None
    where: Callable[[], str]
    began: float


class Processes:
    """This process as one of the workers of a torch.distributed job.

    near: whether ranks of the same host hand values over through shared memory.
    timeout: seconds that this rank waits for others at most; by default as many as the
        process group does.
    what, beside: see Control.
    """

    def __init__(
        self,
        workers: int,
        near: bool = True,
        timeout: float | None = None,
        what: str = "the start of a backend",
        beside: bool = False,
    ) -> None:
        if not dist.is_initialized():
            start_group()
        check_world(workers, dist.get_world_size())
        self.rank, self.workers, self.near = dist.get_rank(), workers, near
        self.what, self.beside = what, beside
        self.process, self.world = os.getpid(), dist.group.WORLD
        self.limit = default_timeout() if timeout is None else timeout
        if timeout is not None:
            _limits.append(timeout)
        self.helpers = Helpers()
        self.mark: Mark | None = None  # of the call; None while it plans
        self.waits: dict[int, Wait] = {}  # by thread
        self.verdict: Exception | None = None  # of the thread that looks after waits
        self.groups: DeviceGroups | None = None  # where messages go by device
        self.ways: set[Way] = set()  # that plans use
        self.closed = threading.Event()
        self._connect((0, 0))
        _all.add(self)
        _tell_at_exit()
        weakref.finalize(self, self.helpers.end, 2 * TICK)
        self.ended = threading.Event()
        args = (weakref.ref(self), self.ended)
        watcher = threading.Thread(
            None, _look_after, "fxsched waits", args, daemon=True
        )
        watcher.start()
        # before Python ends: a thread that it stops inside the store aborts the process
        weakref.finalize(self, _end, watcher, self.ended)

    def _connect(self, numbers: tuple[int, int]) -> None:
        """Makes a group and links, with all other ranks.

        numbers: of calls and of plans so far.
        """
        store = c10d._get_default_store()
        board: Any = c10d.PrefixStore("fxsched", store)
        group, known = _groups[0], (self.rank, self.workers, self.limit, board)
        _groups[0] += 1
        self.control = Control(*known, numbers, group, self.what, self.beside)
        self.neighbours: Mapping[int, Neighbour] = {}
        self._group: dist.ProcessGroup | None = None
        try:
            self._link()
        except Exception as error:
            lost = isinstance(error, RuntimeError)
            reason = self.control.lost(None) if lost else error
            self.fail(reason)
            raise reason from error

    def _link(self) -> None:
        for rank, what in enumerate(self.control.meet("start", self.what)):
            if what != self.what:
                raise PlanError(
                    f"rank {self.rank} is at {self.what}, rank {rank} at {what}; {SAME}"
                )
        late = timedelta(seconds=self.limit + 4 * TICK)  # fxsched's errors say more
        group: Any = dist.new_group(backend="gloo", timeout=late)
        self._group = group
        names = self.all(host_name())
        hosts: dict[object, list[int]] = {}
        for rank, name in enumerate(names):
            hosts.setdefault(name or rank, []).append(rank)
        self.hosts = tuple(map(tuple, hosts.values()))
        if self.near:
            self.neighbours = Neighbours(self.rank, self.all, self.control)

    def go_by_device(self, device: torch.device, backend: str) -> None:
        """Has messages of runs go from device to device."""
        limit = self.limit + 4 * TICK
        self.groups = DeviceGroups(self.rank, device, backend, limit)

    def open(self, ways: Iterable[Way]) -> None:
        """Connects the ranks that a plan has send each other messages, or add up sums;
        all ranks call it with the same plan."""
        if self.groups is not None:
            self.ways.update(ways)
            with self.waiting(None, where=lambda: "connecting devices"):
                self.groups.open(self.ways)

    def await_all(
        self, late: Sequence[tuple[Any, int | None, str]], mark: Mark
    ) -> None:
        """Waits, beside the program, until the device has waited for messages: events,
        of which rank, and in which job."""
        for event, rank, job in late:
            with suppress(Exception), self.waiting(rank, mark, partial(str, job)):
                while not event.query():
                    if self.control.failure is not None:
                        return
                    time.sleep(TICK / 4)

    def reset(self, loaded: bool) -> None:
        """New connections after a failure; all ranks call it.

        Raises PlanError if some ranks have finished more calls than others, unless all
        have loaded the same state since.
        """
        old = self.control
        text = f"rank {self.rank} has called backend.reset() after call {old.calls}"
        self.fail(ConnectionError(text))
        counts = (old.finished, old.calls, old.plans, _groups[0])
        old.what = "backend.reset()"
        finished, calls, plans, groups = zip(
            *old.meet(f"reset {old.resets}", counts), strict=True
        )
        old.resets += 1
        if len(set(finished)) > 1 and not loaded:
            raise PlanError(
                "the ranks have finished different numbers of calls and backward(), "
                f"{list(finished)} by rank, so their parameters may differ; load the "
                "same state on every rank, such as a checkpoint, and call "
                "backend.reset(loaded=True) on all"
            )
        _groups[0] = max(groups)  # a rank that was alone in a call has made more
        self.interrupt()
        self.disconnect()
        old.leave()
        self.verdict = self.mark = None
        self._connect((max(calls), max(plans)))
        self.control.names = old.names
        self.open(())

    def disconnect(self) -> None:
        """Ends links and group; a receive that waits for them must be broken before."""
        if isinstance(self.neighbours, Neighbours):
            self.neighbours.close()
        self.neighbours = {}
        group, self._group = self._group, None  # its threads and sockets end with it
        if group and dist.is_initialized() and dist.group.WORLD is self.world:
            dist.destroy_process_group(group)
            if self.groups is not None:
                self.groups.close()

    @property
    def group(self) -> dist.ProcessGroup:
        """What connects the ranks; ConnectionError once this rank has left it."""
        if self._group is None:
            raise ConnectionError("this rank's backend is closed")
        return self._group

    def close(self) -> None:
        """Ends this rank's part: links, threads and group. Ranks that wait for it
        later on get an error. A second time it does nothing."""
        if self.closed.is_set() or os.getpid() != self.process:
            return
        self.closed.set()
        self.ended.set()
        self.control.close()
        self.helpers.close()
        self.disconnect()

    def interrupt(self) -> None:
        """Breaks the links and the groups' connections."""
        if self.groups is not None:
            self.groups.abort()
        if isinstance(self.neighbours, Neighbours):
            self.neighbours.close()
        if self.workers > 1 and self._group:  # a receive that comes too late closes all
            peer = (self.rank + 1) % self.workers
            with suppress(RuntimeError):
                work = dist.irecv(torch.empty(1), peer, self.group, tag=BROKEN)
                assert work is not None
                work.wait(timedelta(milliseconds=1))

    def fail(self, error: BaseException) -> None:
        """Tells the others that this rank cannot go on, and why: all ranks that wait
        for it, if it is apart from others that wait elsewhere."""
        if self.control.failure is None:
            self.control.fail(error)
            self.interrupt()
            for each in list(_all) if self.control.apart else ():
                each.fail(error)

    @contextmanager
    def waiting(
        self,
        rank: int | None,
        mark: Mark | None = None,
        where: Callable[[], str] = lambda: "",
    ) -> Iterator[None]:
        """Where torch.distributed waits; what goes wrong is told to all and raised.

        rank: whom it waits for, None for all. mark: of the run; by default of the call.
        """
        thread = threading.get_ident()
        self.waits[thread] = Wait(rank, mark or self.mark, where, time.monotonic())
        try:
            yield
        except RuntimeError as error:
            reason = self.verdict or self.control.lost(rank)
            self.fail(reason)
            raise reason from error
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            del self.waits[thread]

    def post(self, call: Any, buffer: Tensor, peer: int, tag: int) -> dist.Work:
        """Starts to send or receive."""
        try:
            work: dist.Work = call(buffer, peer, group=self.group, tag=tag)
            return work
        except RuntimeError as error:  # the connection is gone
            raise self.verdict or self.control.lost(peer) from error

    def run(self, plan: int, inputs: int = 0) -> None:
        """Says which plan this call runs, and on which inputs; see Mark."""
        self.mark = Mark(self.control.calls, plan, inputs)

    def endpoint(self) -> ProcessEndpoint:
        """What the present call sends and takes through, by way of the host."""
        return ProcessEndpoint(self, self._begun())

    def endpoint_of_run(self) -> ProcessEndpoint | DeviceEndpoint:
        """What a run of the present call sends and takes through."""
        if self.groups is None:
            return self.endpoint()
        return DeviceEndpoint(self, self.groups, self._begun())

    def _begun(self) -> Mark:
        """The present call's mark, which others are told."""
        if os.getpid() != self.process:
            raise PlanError(
                "this process was forked from a rank and is none itself; call the "
                "compiled model in the rank"
            )
        assert self.mark is not None, "a call runs a plan"
        self.control.begin(self.mark)
        return self.mark

    def share(self, tensor: Tensor, source: int, to: Sequence[int]) -> None:
        """Copies a tensor from one rank to others; every rank calls it alike."""
        if self.rank == source:
            host = tensor.detach().cpu().contiguous()
            for rank in to:
                if rank != source:
                    with self.waiting(rank):
                        dist.send(host, rank, group=self.group, tag=SHARED)
        elif self.rank in to:
            host = torch.empty(tensor.shape, dtype=tensor.dtype)
            with self.waiting(source):
                dist.recv(host, source, group=self.group, tag=SHARED)
            with torch.no_grad():
                tensor.copy_(host)

    def all(self, value: Any, what: str = "") -> list[Any]:
        """Every rank's value of a small object; `what` says what it is for."""
        values: list[Any] = [None] * dist.get_world_size()
        with self.waiting(None, where=lambda: what):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, call: str, value: Any) -> list[Any]:
        """Every rank's value, where all ranks make the same call.

        Raises PlanError on every rank if one makes another.
        """
        calls, values = zip(*self.all((call, value), call), strict=True)
        for rank, other in enumerate(calls):
            if other != calls[0]:
                raise PlanError(
                    f"rank {rank} calls {other}, but rank 0 calls {calls[0]}; every "
                    "rank must call it, with the same model and arguments"
                )
        return list(values)


def tell_all(error: BaseException) -> None:
    """Tells the ranks of all backends that this one cannot go on, and why."""
    for processes in list(BACKENDS):
        processes.fail(error)


BACKENDS: weakref.WeakSet[Processes] = weakref.WeakSet()  # those of a backend
_all: weakref.WeakSet[Processes] = weakref.WeakSet()
_everyone: dict[str, tuple[Any, Processes]] = {}  # by lane
_limits: deque[float] = deque(maxlen=1)  # of the last backend that was given one


def everyone(call: str, lane: str = "") -> Processes:
    """All ranks, for calls that are no part of a step, such as "full_state_dict".

    lane: each has connections of its own, for calls at the same time.
    Every rank makes its first call of it at the same point, for that makes a process
    group. It waits as long as the last backend(timeout=) says, if there was one.
    """
    limit = _limits[0] if _limits else None
    last = _everyone.get(lane)
    if last is None or last[0] is not dist.group.WORLD or last[1].control.failure:
        size = dist.get_world_size()
        processes = Processes(size, False, limit, call, beside=bool(lane))
        _everyone[lane] = last = dist.group.WORLD, processes
    if limit is not None:
        last[1].control.limit = min(limit, last[1].limit)
    last[1].control.what = call
    return last[1]


@functools.cache
def _tell_at_exit() -> None:
    """Has the others told when the script ends. Python calls last what is registered
    first, as is the end of the threads that write to the board; processes of
    multiprocessing call only its own."""
    atexit.register(_tell_end)
    Finalize(None, _tell_end, exitpriority=1)


def _tell_end() -> None:
    error = getattr(sys, "last_value", sys.exception())
    how = (
        f" with {type(error).__name__}: {error}" if isinstance(error, Exception) else ""
    )
    for processes in sorted(_all, key=lambda each: each.control.calls):
        if os.getpid() == processes.process:
            processes.control.end(how)


def _end(watcher: threading.Thread, ended: threading.Event) -> None:
    """Ends the thread that looks after waits, which takes no longer than a look."""
    ended.set()
    if watcher is not threading.current_thread():
        watcher.join(2 * TICK)


def _look_after(processes: weakref.ref[Processes], ended: threading.Event) -> None:
    """Ends waits inside torch.distributed that are in vain."""
    last: list[Wait] = []
    while not ended.wait(TICK):
        alive = processes()
        if alive is None:
            return
        waits = [*alive.waits.values()]
        try:
            for wait in waits:
                if wait in last:
                    alive.control.idle(wait.rank, wait.mark, wait.began, wait.where())
        except Exception as error:  # raised by who waits
            alive.verdict = error
            alive.fail(error)  # says why before connections break
        last = waits
        del alive, waits


def leave() -> None:
    """Ends this process's part in a torch.distributed job, if it is in one."""
    if dist.is_initialized():
        _everyone.clear()
        dist.destroy_process_group()
