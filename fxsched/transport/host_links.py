"""Sockets between ranks of one host, which take only peers of the same user and run."""

from __future__ import annotations

import hmac
import os
import select
import socket
import struct
import time
from collections.abc import Iterator

HELLO = struct.Struct("<q16s")  # rank, the token of the rank that it connects to
PEER = struct.Struct("iII")  # process, user and group, as SO_PEERCRED gives them


def connected(name: bytes, rank: int, limit: float) -> socket.socket:
    """A link to what another rank listens at."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _set_limit(link, limit)
    try:
        link.connect(name)
    except BlockingIOError:  # others stand in line there
        raise TimeoutError(
            f"fxsched: rank {rank} has not taken a link for {limit:g} s"
        ) from None
    _set_limit(link, 0.0)
    return link


def _set_limit(link: socket.socket, seconds: float) -> None:
    """Bounds how long a link waits to connect or send; 0 for ever."""
    whole, part = divmod(seconds, 1.0)
    interval = struct.pack("ll", int(whole), int(part * 1e6))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)


def guests(
    listener: socket.socket, token: bytes, ranks: set[int], limit: float
) -> Iterator[tuple[int, socket.socket]]:
    """The links that so many ranks open, each with its rank; others are turned away."""
    end = time.monotonic() + limit
    missing = set(ranks)
    strangers: dict[int, socket.socket] = {}
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while missing:
        left = end - time.monotonic()
        if left <= 0 or not (ready := poll.poll(left * 1000)):
            raise TimeoutError(
                f"fxsched: after {limit:g} s ranks {sorted(missing)} have not connected"
            )
        for number, _ in ready:
            if number == listener.fileno():
                link, _ = listener.accept()
                strangers[link.fileno()] = link
                poll.register(link, select.POLLIN)
                continue
            link = strangers.pop(number)
            poll.unregister(link)
            rank = _introduced(link, token)
            if rank in missing:
                missing.remove(rank)
                yield rank, link
            else:
                link.close()
    for link in strangers.values():
        link.close()


def _introduced(link: socket.socket, token: bytes) -> int | None:
    """The rank that a peer says to be, if it is of this user and knows the token."""
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
    try:
        hello = link.recv(HELLO.size + 1, socket.MSG_DONTWAIT)
    except ConnectionError:
        return None
    if PEER.unpack(credentials)[1] != os.getuid() or len(hello) != HELLO.size:
        return None
    rank, secret = HELLO.unpack(hello)
    return int(rank) if hmac.compare_digest(secret, token) else None


def host_name() -> str | None:
    """The same for ranks that can share memory and sockets; None if none can."""
    if not hasattr(os, "memfd_create"):
        return None
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')} {os.getuid()}"
