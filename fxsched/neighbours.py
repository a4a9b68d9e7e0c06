"""Values between the ranks of one host: written to shared memory, told of on a socket.

A rank lends blocks of memory to each neighbour and writes every parcel into one of
them, so a send never waits; the reader's tensors are the block itself, which is free
again once the last of them is gone. What the user gets is copied out of it. Linux
only; elsewhere there are no neighbours.
"""

from __future__ import annotations

import array
import mmap
import os
import queue
import select
import socket
import struct
import threading
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .parcels import ALIGNMENT, Packing, Parcel

NOTE = struct.Struct("<qqqq")  # tag, block, its bytes if it is new, bytes to copy out
DESCRIPTOR = array.array("i").itemsize
LARGEST = 4  # times what a parcel needs; what is larger waits for larger parcels
BUSY, FREE = 1, 0  # the first byte of a block; its contents start at ALIGNMENT


class Block:
    """Shared memory for one parcel at a time."""

    def __init__(self, number: int, descriptor: int, size: int) -> None:
        self.number = number
        self.memory = mmap.mmap(descriptor, size)
        os.close(descriptor)  # the mapping stays
        self.reader: weakref.ref[memoryview] | None = None

    def bytes(self) -> Tensor:
        """The contents; once no tensor of them is left, the block is free."""
        view = memoryview(self.memory)
        self.reader = weakref.ref(view, self._free)
        return torch.frombuffer(view, dtype=torch.uint8, offset=ALIGNMENT)

    def _free(self, _: weakref.ref[memoryview]) -> None:
        self.memory[0] = FREE


class Copied:
    """What was in a block, which is free again."""

    def __init__(self, block: Block, size: int) -> None:
        self.contents = block.bytes()[:size].clone()

    def bytes(self) -> Tensor:
        return self.contents


class Lent(Block):
    """A block that this rank writes to."""

    def __init__(self, number: int, descriptor: int, size: int) -> None:
        super().__init__(number, descriptor, size)
        self.contents = torch.frombuffer(
            self.memory, dtype=torch.uint8, offset=ALIGNMENT
        )
        self.size = size
        self.views: dict[Packing, list[Tensor]] = {}

    def write(self, packing: Packing, value: Any) -> None:
        given = (value,) if isinstance(value, Tensor) else value
        if packing not in self.views:
            self.views[packing] = packing.views(self.contents)
        packing.write(self.views[packing], given)


class Neighbour:
    """Another rank of this host."""

    def __init__(self, rank: int, link: socket.socket, all: Neighbours) -> None:
        self.rank, self.link, self.all = rank, link, all
        self.lent: list[Lent] = []  # by size
        self.borrowed: dict[int, Block] = {}
        self.arrived: dict[int, deque[Block | Copied]] = {}  # by tag, not taken yet
        self.watching: dict[int, queue.SimpleQueue[int]] = {}
        self.reader: threading.Thread | None = None
        self.reading = threading.Lock()
        self.changed = threading.Lock()
        self.gone = False

    def send(self, value: Any, parcel: Parcel) -> None:
        if self.reader is None:
            self._catch_up()
        packing = parcel.packing
        size = _room(packing.bytes + ALIGNMENT)
        fits = (b for b in self.lent if size <= b.size <= LARGEST * size)
        block = next((b for b in fits if b.memory[0] == FREE), None)
        descriptor = None
        if block is None:
            new = os.memfd_create("fxsched")
            os.ftruncate(new, size)
            descriptor = os.dup(new)
            block = Lent(len(self.lent), new, size)
            insort(self.lent, block, key=lambda b: b.size)
        block.memory[0] = BUSY
        block.write(packing, value)
        try:
            fresh = 0 if descriptor is None else size
            copied = packing.bytes if parcel.kept else 0
            note = NOTE.pack(parcel.tag, block.number, fresh, copied)
            self._tell(note, descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _tell(self, note: bytes, descriptor: int | None = None) -> None:
        """Sends a note. While there is no room for it, reads what comes from anyone:
        two ranks that fill each other's sockets would wait for ever otherwise."""
        extra: list[tuple[int, int, Any]] = []
        if descriptor is not None:
            rights = array.array("i", [descriptor])
            extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        while True:
            try:
                self.link.sendmsg([note], extra, socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                self.all.drain(self)
            except (BrokenPipeError, ConnectionResetError):
                raise self._lost() from None

    def take(self, parcel: Parcel) -> Any:
        """A parcel's value; waits for it."""
        while (block := self._pop(parcel.tag)) is None:
            if self.reader is not None:
                raise self._lost()  # a watched parcel is there, or never comes
            self.read()
        packing = parcel.packing
        found = packing.read(packing.views(block.bytes()))
        return tuple(found) if parcel.bundle else found[0]

    def _pop(self, tag: int) -> Block | Copied | None:
        with self.changed:
            blocks = self.arrived.get(tag)
            if blocks is None:
                return None
            block = blocks.popleft()
            if not blocks:
                del self.arrived[tag]
            return block

    def read(self, flags: int = 0) -> None:
        """Reads one note, and waits for it unless flags say MSG_DONTWAIT."""
        with self.reading:
            try:
                note, extra, _, _ = self.link.recvmsg(
                    NOTE.size, socket.CMSG_SPACE(DESCRIPTOR), flags
                )
            except ConnectionResetError:
                note = b""
            if not note:
                raise self._lost()
            tag, number, size, copied = NOTE.unpack(note)
            if size:
                (descriptor,) = array.array("i", extra[0][2][:DESCRIPTOR])
                self.borrowed[number] = Block(number, descriptor, size)
            block = self.borrowed[number]
            value = Copied(block, copied) if copied else block
            with self.changed:
                self.arrived.setdefault(tag, deque()).append(value)
                if tag in self.watching:
                    self.watching.pop(tag).put(tag)

    def _catch_up(self) -> None:
        """Reads the notes that are there, and copies out what they say to."""
        try:
            while True:
                self.read(socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass

    def watch(self, tag: int, arrived: queue.SimpleQueue[int]) -> None:
        """Puts the tag in a queue once its parcel is there, or nothing more comes."""
        if self.reader is None:  # a daemon: a rank that fails exits though it waits
            self.reader = threading.Thread(target=self._keep_reading, daemon=True)
            self.reader.start()
        with self.changed:
            if tag in self.arrived or self.gone:
                arrived.put(tag)
            else:
                self.watching[tag] = arrived

    def _keep_reading(self) -> None:
        try:
            while True:
                self.read()
        except ConnectionError:
            with self.changed:
                self.gone = True
                for tag, arrived in self.watching.items():
                    arrived.put(tag)

    def _lost(self) -> ConnectionError:
        return ConnectionError(f"fxsched: worker {self.rank} has ended")


class Neighbours(dict[int, Neighbour]):
    """The other ranks of this host, by rank; all ranks make it at the same time.

    gather: gives every rank's value of a small object, by rank.
    """

    def __init__(self, rank: int, gather: Callable[[Any], list[Any]]) -> None:
        super().__init__()
        host = _host()
        if host is None:
            gather(None)
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("")  # the kernel finds a name that is no file
            listener.listen(socket.SOMAXCONN)
            everyone = gather((host, listener.getsockname()))
            near = [r for r, each in enumerate(everyone) if each and each[0] == host]
            for other in (r for r in near if r < rank):
                link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                link.connect(everyone[other][1])
                link.send(NOTE.pack(rank, 0, 0, 0))
                self[other] = Neighbour(other, link, self)
            for _ in (r for r in near if r > rank):
                link, _ = listener.accept()
                other, *_ = NOTE.unpack(link.recv(NOTE.size))
                self[other] = Neighbour(other, link, self)

    def drain(self, wanted: Neighbour) -> None:
        """Reads what others sent until one can be written to."""
        by_number = {each.link.fileno(): each for each in self.values()}
        poll = select.poll()
        for number, each in by_number.items():
            own = select.POLLIN if each.reader is None else 0
            poll.register(number, own | (select.POLLOUT if each is wanted else 0))
        while True:
            for number, event in poll.poll():
                if event & (select.POLLOUT | select.POLLERR | select.POLLHUP):
                    return
                by_number[number].read(socket.MSG_DONTWAIT)


def _room(size: int) -> int:
    """The size of a new block for so many bytes, with room for somewhat larger parcels
    later: up to a quarter more, which takes no memory until it is written to."""
    step = max(mmap.PAGESIZE, 1 << size.bit_length() >> 3)
    return -(-size // step) * step


def _host() -> str | None:
    """The same for ranks that can share memory and sockets; None if none can."""
    if not hasattr(os, "memfd_create"):
        return None
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')} {os.getuid()}"
