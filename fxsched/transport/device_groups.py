"""Messages from device to device: process groups of a backend such as NCCL."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..ir.step import Way
from ..jobs.job import PlanError
from .ordered import Work


def backend_of(device: torch.device) -> str | None:
    """The backend of torch.distributed that sends tensors of a device without the host,
    such as "nccl"; None if there is none here."""
    name = dist.Backend.default_device_backend_map.get(device.type)
    there = device.type != "cpu" and name and dist.is_backend_available(name)
    return name if there else None


def check_backend(asked: str, device: torch.device) -> None:
    """Raises PlanError unless tensors of a device are sent by the backend asked for."""
    if (found := backend_of(device)) != asked:
        instead = f"the backend of {device.type} here is {found!r}"
        if device.type == "cpu":
            instead = (
                "the model's tensors are on the CPU; move model and batch to a GPU"
            )
        raise PlanError(
            f"backend(transport={asked!r}): {instead}; or leave transport= out"
        )


class DeviceGroups:
    """Connections of this rank: for each directed edge a process group of two ranks, so
    that a message never waits for one of another edge; and for each set of ranks that
    add up sums.

    device: whose memory messages lie in. limit: seconds that a message may take.
    """

    def __init__(
        self, rank: int, device: torch.device, backend: str, limit: float
    ) -> None:
        self.rank, self.device, self.backend, self.limit = rank, device, backend, limit
        self.groups: dict[Way, Any] = {}

    def open(self, ways: Iterable[Way]) -> None:
        """Makes what isn't there yet, and uses each once: a backend connects ranks when
        they first send. All ranks call it with the same ways."""
        for way in sorted(set(ways) - set(self.groups), key=_place):
            late = timedelta(seconds=self.limit)
            self.groups[way] = dist.new_group(sorted(way), late, backend=self.backend)
            if self.rank in way:
                byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
                self._first(way)(byte, 0).wait()

    def _first(self, way: Way) -> Callable[[Tensor, int], Work]:
        """How this rank first uses a connection."""
        if isinstance(way, frozenset):
            return self.meeting(way).all_reduce
        connection = self.connection(*way)
        return connection.send if self.rank == way[0] else connection.receive

    def connection(self, source: int, to: int) -> GroupConnection:
        """The way from one rank to another."""
        if (group := self.groups.get((source, to))) is None:
            raise PlanError(
                f"passes=: rank {source} sends to rank {to}, which it doesn't by the "
                "plan, so they have no process group; let a rank send that has one"
            )
        return GroupConnection(source, to, group)

    def meeting(self, ranks: Iterable[int]) -> GroupMeeting:
        """The way between ranks that add up sums."""
        return GroupMeeting(self.groups[frozenset(ranks)])

    def abort(self) -> None:
        """Ends what is under way, so that nothing waits for it."""
        for group in self._own():
            with suppress(RuntimeError):
                group.abort()

    def close(self) -> None:
        """Ends the process groups."""
        for group in self._own():
            dist.destroy_process_group(group)
        self.groups.clear()

    def _own(self) -> list[Any]:
        return [group for way, group in self.groups.items() if self.rank in way]


def _place(way: Way) -> tuple[bool, list[int]]:
    """Of a way among all, the same on all ranks."""
    sums = isinstance(way, frozenset)
    return sums, sorted(way) if sums else [*way]


class GroupMeeting(NamedTuple):
    """The way between ranks that add up sums."""

    group: Any

    def all_reduce(self, buffer: Tensor, tag: int) -> Work:
        """Begins to add up the buffers of all, in each of them."""
        work: Work = dist.all_reduce(buffer, group=self.group, async_op=True)
        return work


class GroupConnection(NamedTuple):
    """The way from one rank to another. Messages have no tags: NCCL's have none."""

    source: int
    to: int
    group: Any

    def send(self, buffer: Tensor, tag: int) -> Work:
        """Begins to send, once what the present stream has so far is done."""
        work = dist.isend(buffer, self.to, self.group)
        assert work is not None, "this rank is one of the two"
        return work

    def receive(self, buffer: Tensor, tag: int) -> Work:
        """Begins to receive, likewise."""
        work = dist.irecv(buffer, self.source, self.group)
        assert work is not None, "this rank is one of the two"
        return work
