"""Values between the ranks of one host: written to shared memory, told of on a socket.

A rank lends blocks of memory to each neighbour and writes every parcel into one of
them, so a send never waits; the reader's tensors are the block itself, which is free
again once the last of them is gone. What the user gets is copied out of it. While a
rank waits for one neighbour it reads what all of them send, so that none is held up by
another's full socket. Linux only; elsewhere there are no neighbours.

Weights are written once the reader has said that it has room for them, so that a rank
that is ahead doesn't fill the memory of the others. Until then they are kept where they
are; a rank looks for such notes whenever it sends, expects, takes or waits.

The sockets have names that any process of the host can connect to. A rank takes only a
peer of its own user that knows its token, which the process group hands to all ranks.
What forks from a rank closes the links and leaves the blocks to its parent.

Every note carries the Mark of its step; see fxsched/transport/control.py.
"""

from __future__ import annotations

import array
import contextlib
import os
import queue
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable
from typing import Any

from .board import TICK, Mark
from .control import Control
from .host_links import HELLO, connected, guests, host_name
from .lane import Lane
from .memory_blocks import BUSY, FREE, Block, Copied, Lent, block_size
from .wire_format import ALIGNMENT, Parcel

# tag, block or ROOM, its bytes if it is new, bytes to copy out, and the mark
NOTE = struct.Struct("<qqqqqqq")
DESCRIPTOR = array.array("i").itemsize
ROOM = -1  # in place of a block: the weights of this tag may come
LARGEST = 4  # times what a parcel needs; what is larger waits for larger parcels
NO_CALL = Mark(0, 0)
_OPEN: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # links of this process


class LinkEnded(ConnectionError):
    """A link has ended. Who needs what should have come over it asks why."""


class Neighbour:
    """Another rank of this host."""

    def __init__(self, rank: int, link: socket.socket, all: Neighbours) -> None:
        self.rank, self.link, self.all = rank, link, all
        self.lent: list[Lent] = []  # by size
        self.borrowed: dict[int, Block] = {}
        # by call and tag, not taken yet
        self.arrived: dict[tuple[int, int], deque[Block | Copied]] = {}
        self.watching: dict[tuple[int, int], queue.SimpleQueue[int]] = {}
        # weights by call and tag: that the other has room for; that wait for room
        self.room: set[tuple[int, int]] = set()
        self.kept: dict[tuple[int, int], tuple[Any, Parcel, Mark]] = {}
        self.due: deque[tuple[Any, Parcel, Mark]] = deque()  # has room now
        self.writes = False  # what is due
        self.lane = Lane()  # writes what was kept, where a thread reads
        self.reader: threading.Thread | None = None
        self.reading = threading.Lock()
        self.changed, self.lending = threading.Condition(), threading.Lock()
        self.gone = False
        self.fault: Exception | None = None  # what ended the reader
        _OPEN.add(link)

    def send(self, value: Any, parcel: Parcel, mark: Mark = NO_CALL) -> None:
        """Writes a value; keeps weights until the other rank has room for them."""
        self.all.look(self)
        key = mark.call, parcel.tag
        if parcel.weights:
            with self.changed:
                if key not in self.room:
                    self.kept[key] = value, parcel, mark
                    return
                self.room.remove(key)
        self._write(value, parcel, mark)

    def expect(self, parcel: Parcel, mark: Mark = NO_CALL) -> None:
        """Says that there is room for weights that will be taken."""
        if parcel.weights:
            self._tell(NOTE.pack(parcel.tag, ROOM, 0, 0, *mark), mark, None)
            self.all.look()

    def finish(
        self, mark: Mark = NO_CALL, where: Callable[[], str] = lambda: ""
    ) -> None:
        """Waits until the other rank has had room for all that was kept."""
        began = time.monotonic()
        while self.kept:
            if self.reader is None:
                self._read_next(mark, where)
                continue
            with self.changed:
                told = not self.kept or self.changed.wait(TICK)
                if self.kept and self.fault is not None:
                    raise self._lost()
            if not told:
                self.all.control.idle(self.rank, mark, began, where())
        self.lane.finish()

    def _write(self, value: Any, parcel: Parcel, mark: Mark) -> None:
        """Puts a value into a free block and tells the other rank."""
        packing = parcel.packing
        size = block_size(packing.bytes + ALIGNMENT)
        with self.lending:
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
            copied = packing.bytes if parcel.outlives_step else 0
            note = NOTE.pack(parcel.tag, block.number, fresh, copied, *mark)
            self._tell(note, mark, descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _tell(self, note: bytes, mark: Mark, descriptor: int | None) -> None:
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
                self.all.wait(self, select.POLLOUT, mark)
            except OSError:
                raise self._lost() from None

    def take(
        self,
        parcel: Parcel,
        mark: Mark = NO_CALL,
        where: Callable[[], str] = lambda: "",
    ) -> Any:
        """A parcel's value; waits for it. where: the job that it is for."""
        self.all.look()
        if self.reader is not None:
            arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
            self.watch(parcel.tag, arrived, mark)
            self.all.control.next(arrived, mark, lambda: (self.rank, where()))
        while (block := self._pop((mark.call, parcel.tag))) is None:
            if self.reader is not None:
                raise self._lost()  # a watched parcel is there, or never comes
            self._read_next(mark, where)
        packing = parcel.packing
        tensors = packing.read(packing.views(block.bytes()))
        return tuple(tensors) if parcel.bundle else tensors[0]

    def _read_next(self, mark: Mark, where: Callable[[], str]) -> None:
        """Reads a note, or waits until there is one."""
        try:
            self.read(socket.MSG_DONTWAIT)
        except BlockingIOError:
            self.all.wait(self, select.POLLIN, mark, where)
        except LinkEnded:
            raise self._lost() from None

    def _pop(self, key: tuple[int, int]) -> Block | Copied | None:
        with self.changed:
            blocks = self.arrived.get(key)
            if blocks is None:
                return None
            block = blocks.popleft()
            if not blocks:
                del self.arrived[key]
            return block

    def read(self, flags: int = 0) -> None:
        """Reads one note, and waits for it unless flags say MSG_DONTWAIT.

        Raises LinkEnded at the end of the link.
        """
        with self.reading:
            try:
                note, extra, _, _ = self.link.recvmsg(
                    NOTE.size, socket.CMSG_SPACE(DESCRIPTOR), flags
                )
            except BlockingIOError:
                raise
            except OSError:  # reset, or closed here
                note = b""
            if not note:
                self.gone = True
                raise LinkEnded
            tag, number, size, copied, *mark = NOTE.unpack(note)
            if size:
                (descriptor,) = array.array("i", extra[0][2][:DESCRIPTOR])
                self.borrowed[number] = Block(number, descriptor, size)
            if number != ROOM:
                block = self.borrowed[number]
                value = Copied(block, copied) if copied else block
            if tuple(mark) != self.all.control.latest:
                self.all.control.check_mark(self.rank, Mark(*mark))
            key = (mark[0], tag)
            with self.changed:
                if number != ROOM:
                    self.arrived.setdefault(key, deque()).append(value)
                    if key in self.watching:
                        self.watching.pop(key).put(tag)
                    return
                kept = self.kept.get(key)
                if kept is None:
                    self.room.add(key)
                    return
        self._write_kept(key, kept)

    def _write_kept(self, key: tuple[int, int], kept: tuple[Any, Parcel, Mark]) -> None:
        """Writes weights that the other rank has room for now. To write may mean to
        read: what is read then is written after it, and a thread that does nothing but
        read leaves it to another."""
        aside = self.reader is not None
        if aside:
            self.lane.call("", self._write, *kept)
        with self.changed:  # who waits for it waits for the lane next
            del self.kept[key]
            self.changed.notify_all()
        if aside:
            return
        self.due.append(kept)
        if not self.writes:
            self.writes = True
            while self.due:
                self._write(*self.due.popleft())
            self.writes = False

    def catch_up(self) -> None:
        """Reads the notes that are there, and does what they say."""
        with contextlib.suppress(BlockingIOError, LinkEnded):
            while True:
                self.read(socket.MSG_DONTWAIT)

    def watch(
        self, tag: int, arrived: queue.SimpleQueue[int], mark: Mark = NO_CALL
    ) -> None:
        """Puts the tag in a queue once its parcel is there, or nothing more comes."""
        self.start_reader()
        with self.changed:
            if (mark.call, tag) in self.arrived or self.fault is not None:
                arrived.put(tag)
            else:
                self.watching[mark.call, tag] = arrived

    def start_reader(self) -> None:
        """Has a thread read what comes, so that several threads can take it."""
        if self.reader is None:  # a daemon: a rank that fails exits though it waits
            name = f"fxsched reads {self.rank}"
            self.reader = threading.Thread(None, self._keep_reading, name, daemon=True)
            self.reader.start()

    def _keep_reading(self) -> None:
        try:
            while True:
                self.read()
        except Exception as error:  # raised by who takes what it should have read
            with self.changed:
                self.fault = error
                self.changed.notify_all()
                for (_, tag), arrived in self.watching.items():
                    arrived.put(tag)

    def _lost(self) -> Exception:
        if self.fault is None or isinstance(self.fault, LinkEnded):
            return self.all.control.lost(self.rank)
        return self.fault


class Neighbours(dict[int, Neighbour]):
    """The other ranks of this host, by rank; all ranks make it at the same time.

    gather: gives every rank's value of a small object, by rank.
    control: says how long to wait, and for what; TimeoutError after that.
    """

    def __init__(
        self,
        rank: int,
        gather: Callable[[Any], list[Any]],
        control: Control | None = None,
    ) -> None:
        super().__init__()
        self.control = control or Control(rank, 0, 1800.0)
        limit = self.control.limit
        host = host_name()
        if host is None:
            gather(None)
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("")  # the kernel finds a name that is no file
            listener.listen(socket.SOMAXCONN)
            token = secrets.token_bytes(16)
            everyone = gather((host, listener.getsockname(), token))
            near = [r for r, each in enumerate(everyone) if each and each[0] == host]
            for other in (r for r in near if r < rank):
                _, name, secret = everyone[other]
                link = connected(name, other, limit)
                link.send(HELLO.pack(rank, secret))
                self[other] = Neighbour(other, link, self)
            higher = {r for r in near if r > rank}
            for other, link in guests(listener, token, higher, limit):
                self[other] = Neighbour(other, link, self)

    def look(self, to: Neighbour | None = None) -> None:
        """Reads what those say that this rank keeps weights for, or will send to."""
        for each in self.values():
            if each.reader is None and (each is to or each.kept):
                each.catch_up()

    def wait(
        self,
        wanted: Neighbour,
        event: int,
        mark: Mark,
        where: Callable[[], str] = lambda: "",
    ) -> None:
        """Reads what the others send until one can be read from or written to."""
        others = {
            each.link.fileno(): each
            for each in self.values()
            if each.reader is None and not each.gone
        }
        poll = select.poll()
        for number in others:
            poll.register(number, select.POLLIN)
        descriptor = wanted.link.fileno()
        poll.register(
            descriptor, event | (select.POLLIN if descriptor in others else 0)
        )
        began = time.monotonic()
        due = began + TICK
        while True:
            ready = poll.poll(TICK * 1000)
            if not ready or time.monotonic() >= due:
                self.control.idle(wanted.rank, mark, began, where())
                due = time.monotonic() + TICK
            for number, state in ready:
                if number == descriptor and state & ~select.POLLIN | state & event:
                    return
                try:
                    others[number].read(socket.MSG_DONTWAIT)
                except LinkEnded:  # which harms who waits for it
                    poll.unregister(number)

    def close(self) -> None:
        """Ends the links, and all waits for them here and there."""
        for each in self.values():
            with contextlib.suppress(OSError):  # the other end was first
                each.link.shutdown(socket.SHUT_RDWR)


def _close_all() -> None:
    for link in _OPEN:
        link.close()


os.register_at_fork(after_in_child=_close_all)
