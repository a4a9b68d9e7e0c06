"""Links between the ranks of one host: who may take them, and what forks or waits."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from fxsched.ir.graphs import Spec
from fxsched.transport.control import Control
from fxsched.transport.host_links import HELLO
from fxsched.transport.shared_memory import Neighbours
from fxsched.transport.wire_format import Parcel

VALUE = torch.arange(512.0)


def letter(to: int, tag: int = 0, value: Tensor = VALUE) -> Parcel:
    return Parcel(to, tag, (Spec.of(value),), bundle=False, weights=False)


class Meeting:
    """Ranks of one process that gather values; `before` is done once all are here."""

    def __init__(self, ranks: int, before: Callable[[list[Any]], None]) -> None:
        self.everyone: list[Any] = [None] * ranks
        self.met = threading.Barrier(ranks, lambda: before(self.everyone))
        self.neighbours: dict[int, Neighbours] = {}

    def join(self, rank: int, limit: float) -> None:
        def gather(value: Any) -> list[Any]:
            self.everyone[rank] = value
            self.met.wait()
            return self.everyone

        control = Control(rank, len(self.everyone), limit)
        self.neighbours[rank] = Neighbours(rank, gather, control)


def meet(
    ranks: int = 2,
    before: Callable[[list[Any]], None] = lambda everyone: None,
) -> dict[int, Neighbours]:
    meeting = Meeting(ranks, before)
    threads = [
        threading.Thread(target=meeting.join, args=(rank, 20.0))
        for rank in range(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(meeting.neighbours) == ranks
    return meeting.neighbours


def test_a_fork_leaves_blocks_and_links_to_its_parent() -> None:
    ends = meet()
    here, there = ends[0][1], ends[1][0]
    here.send(VALUE, letter(1))
    taken = there.take(letter(1))
    child = os.fork()
    if not child:  # a DataLoader's worker, say, that ends
        try:
            del taken
            closed = here.link.fileno() == there.link.fileno() == -1
            os._exit(0 if closed else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    here.send(VALUE + 1, letter(1))  # not into the block that is still read
    assert torch.equal(taken, VALUE)
    assert torch.equal(there.take(letter(1)), VALUE + 1)
    assert len(here.lent) == 2


PARCELS = 400  # unread, they fill a socket


def three(rank: int, met: Barrier, board: Any, result: Connection) -> None:
    """0 sends to 1, which waits for 2, which waits for 0."""

    def gather(value: Any) -> list[Any]:
        board[rank] = value
        met.wait(30)
        return [board[i] for i in range(3)]

    near = Neighbours(rank, gather, Control(rank, 3, 30.0))
    if rank == 0:
        for tag in range(PARCELS):
            near[1].send(VALUE + tag, letter(1, tag))
        near[2].send(VALUE, letter(2))
    elif rank == 1:
        near[2].take(letter(2))
        for tag in range(PARCELS):
            assert torch.equal(near[0].take(letter(0, tag)), VALUE + tag)
    else:
        near[0].take(letter(0))
        near[1].send(VALUE, letter(1))
    result.send("done")


@pytest.mark.slow
def test_three_that_wait_in_a_row_read_what_others_send_meanwhile() -> None:
    context = multiprocessing.get_context("fork")
    with context.Manager() as manager:
        board, met = manager.dict(), context.Barrier(3)
        pipes = [context.Pipe(duplex=False) for _ in range(3)]
        ranks = [
            context.Process(target=three, args=(rank, met, board, pipe[1]), daemon=True)
            for rank, pipe in enumerate(pipes)
        ]
        for rank in ranks:
            rank.start()
        ended = [pipe[0].poll(30) for pipe in pipes]
        for rank in ranks:
            rank.kill()
        assert ended == [True] * 3


@pytest.mark.parametrize(
    "says",
    [
        lambda token: HELLO.pack(1, bytes(16)),
        lambda token: b"let me in",
        lambda token: HELLO.pack(7, token),
        lambda token: b"",  # it hangs up
        lambda token: None,  # it says nothing
    ],
    ids=["another token", "garbage", "no rank of ours", "hangs up", "silent"],
)
def test_a_stranger_that_connects_first_gets_no_place(
    says: Callable[[bytes], bytes | None],
) -> None:
    strangers = []

    def intrude(everyone: list[Any]) -> None:
        _, name, token = everyone[0]
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(name)
        if said := says(token):
            stranger.send(said)
        if said == b"":
            stranger.close()
        strangers.append(stranger)

    ends = meet(before=intrude)
    here, there = ends[0][1], ends[1][0]
    there.send(VALUE, letter(0))
    assert torch.equal(here.take(letter(0)), VALUE)
    if says(b"") != b"":
        (stranger,) = strangers
        stranger.settimeout(10)
        with pytest.raises(ConnectionError):  # turned away, without a descriptor
            if not stranger.recv(1):
                raise ConnectionError


def test_ranks_wait_for_links_for_a_time() -> None:
    everyone: list[Any] = []

    def gather(value: Any) -> list[Any]:
        host, _, token = value
        everyone[:] = [value, (host, b"\0none", token)]
        return everyone

    with pytest.raises(TimeoutError, match=r"after 0.2 s ranks \[1\] have not conn"):
        Neighbours(0, gather, Control(0, 2, 0.2))
