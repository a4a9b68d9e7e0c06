"""Values between ranks: as bytes and back, and through shared memory."""

from __future__ import annotations

import gc
import queue
import socket
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed import distributed_c10d as c10d

from fxsched.ir.graphs import Spec
from fxsched.transport import world
from fxsched.transport.board import Mark
from fxsched.transport.helper_threads import Helpers
from fxsched.transport.processes import ProcessEndpoint
from fxsched.transport.shared_memory import Neighbour, Neighbours
from fxsched.transport.wire_format import Packing, Parcel

VALUES: dict[str, Tensor] = {
    "contiguous": torch.arange(12.0).view(3, 4),
    "0-d": torch.tensor(True),
    "empty": torch.empty(0, 3),
    "expanded empty": torch.empty(0).expand(3, 0),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "slice": torch.arange(24.0).view(4, 6).chunk(3, 1)[1],
    "expanded": torch.arange(3.0).view(3, 1).expand(3, 4),
    "one number, expanded": torch.tensor(2.0).expand(4, 8),
    "overlapping": torch.arange(8.0).unfold(0, 4, 2),
    "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "conjugate": torch.rand(3, 4, dtype=torch.cfloat).conj(),
    "bfloat16": torch.rand(3, 3).bfloat16(),
}


def parcel(value: Any, tag: int = 0, weights: bool = False) -> Parcel:
    bundle = isinstance(value, tuple)
    specs = tuple(map(Spec.of, value if bundle else (value,)))
    return Parcel(1, tag, specs, bundle, weights)


def same(found: Any, sent: Any) -> None:
    pairs = (
        zip(found, sent, strict=True) if isinstance(sent, tuple) else [(found, sent)]
    )
    for got, given in pairs:
        assert torch.equal(got, given)
        if given.numel() and _fills(given):
            assert got.stride() == given.stride()


def _fills(tensor: Tensor) -> bool:
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return 0 in tensor.stride() or reach + 1 >= tensor.numel()


@pytest.mark.parametrize("name", VALUES)
def test_a_tensor_arrives_as_it_was_alone_and_in_a_bundle(name: str) -> None:
    value = VALUES[name]
    for sent in (value, (value, torch.ones(3), value)):
        given = sent if isinstance(sent, tuple) else (sent,)
        packing = Packing(tuple(map(Spec.of, given)))
        memory = torch.empty(packing.bytes, dtype=torch.uint8)
        packing.write(packing.views(memory), given)
        same(tuple(packing.read(packing.views(memory))), given)


@pytest.fixture
def pair() -> tuple[Neighbour, Neighbour]:
    """The two ends of one link, both in this process."""
    everyone: list[Any] = [None, None]
    met = threading.Barrier(2)

    def gather(rank: int, value: Any) -> list[Any]:
        everyone[rank] = value
        met.wait()
        return everyone

    ends: dict[int, Neighbours] = {}

    def join(rank: int) -> None:
        ends[rank] = Neighbours(rank, lambda value: gather(rank, value))

    other = threading.Thread(target=join, args=(1,))
    other.start()
    join(0)
    other.join()
    return ends[0][1], ends[1][0]


def test_neighbours_hand_over_any_value(pair: tuple[Neighbour, Neighbour]) -> None:
    here, there = pair
    everything = tuple(VALUES.values())
    sent = [*everything, everything]
    for tag, value in enumerate(sent):
        here.send(value, parcel(value, tag))
    for tag, value in reversed(list(enumerate(sent))):  # in any order
        same(there.take(parcel(value, tag)), value)


def test_a_block_is_lent_again_once_nothing_reads_it(
    pair: tuple[Neighbour, Neighbour],
) -> None:
    here, there = pair
    value = torch.arange(4.0)
    letter = parcel(value)
    for round in range(5):
        here.send(value + round, letter)
        found = there.take(letter)
        assert torch.equal(found, value + round)
        del found
    assert len(here.lent) == 1
    kept = []
    for round in range(3):
        here.send(value + round, letter)
        kept.append(there.take(letter)[1:])  # a view holds it, too
    assert len(here.lent) == 3
    for round, part in enumerate(kept):
        assert torch.equal(part, (value + round)[1:])
    kept.clear()
    del part
    gc.collect()
    here.send(value, letter)
    assert len(here.lent) == 3


def test_a_block_of_inference_mode_is_lent_again_without(
    pair: tuple[Neighbour, Neighbour],
) -> None:
    """As where a model is evaluated before it is trained."""
    here, there = pair
    value = torch.arange(4.0)
    here.start_reader()  # so that a thread without the mode writes weights
    for tag, (inference, weights) in enumerate(
        [(True, False), (False, False), (True, True), (False, True)]
    ):
        letter = parcel(value, tag, weights)
        with torch.inference_mode(inference):
            here.send(value.clone(), letter)
            there.expect(letter)
            here.finish()
            same(there.take(letter), value)
    assert len(here.lent) == 1


def test_what_the_user_keeps_is_copied_out_of_its_block(
    pair: tuple[Neighbour, Neighbour],
) -> None:
    here, there = pair
    value = torch.arange(1000.0)
    letters = [
        Parcel(
            1, tag, (Spec.of(value + tag),), False, weights=False, outlives_step=True
        )
        for tag in range(4)
    ]
    kept = []
    for letter in letters:
        here.send(value + letter.tag, letter)
        kept.append(there.take(letter))
    for tag, found in enumerate(kept):
        assert torch.equal(found, value + tag)
    for letter in letters:  # before it sends, each copies out what has come meanwhile
        here.send(value, letter)
        there.send(value, letter)
    assert len(here.lent) == len(there.lent) == 1


def test_a_block_serves_parcels_of_other_sizes(
    pair: tuple[Neighbour, Neighbour],
) -> None:
    here, there = pair
    for size, blocks in ((1 << 20, 1), ((1 << 20) + 999, 1), (1 << 19, 1), (9, 2)):
        value = torch.ones(size)
        here.send(value, parcel(value))
        assert torch.equal(there.take(parcel(value)), value)
        assert len(here.lent) == blocks


@pytest.mark.slow
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_two_that_fill_each_others_sockets_go_on(
    weights: bool, shared: bool, pair: tuple[Neighbour, Neighbour]
) -> None:
    """Neither reads before it has sent all, and asked for all."""
    value, count = torch.zeros(1), 2000
    letters = [parcel(value, tag, weights) for tag in range(count)]

    def talk(end: Neighbour, shift: float) -> None:
        if shared:
            end.start_reader()
        for tag, letter in enumerate(letters):
            end.send(value + tag + shift, letter)
        for letter in letters:
            end.expect(letter)
        end.finish()
        for tag, letter in enumerate(letters):
            assert end.take(letter).item() == tag + 0.5 - shift
        done.append(end)

    done: list[Neighbour] = []
    ends = [
        threading.Thread(target=talk, args=(end, shift))
        for end, shift in zip(pair, (0.0, 0.5), strict=True)
    ]
    for each in ends:
        each.start()
    for each in ends:
        each.join(60)
    assert len(done) == 2


def test_weights_wait_where_they_are_until_there_is_room(
    pair: tuple[Neighbour, Neighbour],
) -> None:
    here, there = pair
    value = torch.arange(4.0)
    for tag in range(3):
        here.send(value, parcel(value, tag, weights=True))
    here.send(value, parcel(value, 3))
    assert len(here.lent) == 1  # the block of what aren't weights
    for tag in (1, 4):  # one that was sent, and one that will be
        there.expect(parcel(value, tag, weights=True))
    assert len(here.lent) == 1
    there.send(value, parcel(value, 5))
    here.take(parcel(value, 5))  # looks for notes
    assert len(here.lent) == 2
    same(there.take(parcel(value, 1, weights=True)), value)
    here.send(value, parcel(value, 4, weights=True))
    same(there.take(parcel(value, 4, weights=True)), value)
    there.expect(parcel(value, 0, weights=True))
    there.expect(parcel(value, 2, weights=True))
    here.finish()
    for tag in (0, 2):
        same(there.take(parcel(value, tag, weights=True)), value)
    assert not here.kept
    assert not here.room


@pytest.mark.parametrize("shared", [False, True])
def test_who_keeps_weights_for_one_that_is_gone_says_so(
    shared: bool, pair: tuple[Neighbour, Neighbour]
) -> None:
    here, there = pair
    value = torch.arange(4.0)
    if shared:
        here.start_reader()
    here.send(value, parcel(value, weights=True))
    there.link.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ConnectionError, match="lost rank 1 at the start"):
        here.finish()


def test_weights_that_wait_hold_up_no_other_send() -> None:
    """Over torch.distributed: what has left is let go of."""
    asked = threading.Event()

    class Work:
        def __init__(self, tag: int) -> None:
            self.tag = tag

        def wait(self) -> None:
            if not self.tag:
                asked.wait()

    def post(call: object, buffer: Tensor, peer: int, tag: int) -> Work:
        return Work(tag - endpoint.first)

    processes: Any = SimpleNamespace(
        neighbours={}, workers=2, helpers=Helpers(), post=post
    )
    endpoint = ProcessEndpoint(processes, Mark(0, 0))
    weights, value = torch.ones(4), torch.ones(4)
    endpoint.send(weights, parcel(weights, 0, weights=True))
    endpoint.send(value, parcel(value, 1))
    sent = weakref.ref(value)
    del value
    due = time.monotonic() + 10
    while (held := sent() is not None) and time.monotonic() < due:
        time.sleep(0.01)
    asked.set()
    assert not held
    processes.helpers.close()


def test_one_that_watches_is_told(pair: tuple[Neighbour, Neighbour]) -> None:
    here, there = pair
    value = torch.ones(2)
    arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
    here.send(value, parcel(value, 3))
    there.watch(3, arrived)
    assert arrived.get(timeout=10) == 3
    there.watch(4, arrived)
    here.send(value, parcel(value, 4))
    assert arrived.get(timeout=10) == 4
    same(there.take(parcel(value, 4)), value)
    there.watch(5, arrived)
    here.link.shutdown(socket.SHUT_RDWR)
    assert arrived.get(timeout=10) == 5  # nothing more comes
    with pytest.raises(ConnectionError, match="lost rank 0 at the start"):
        there.take(parcel(value, 5))
    with pytest.raises(ConnectionError, match="lost rank 1 at the start"):
        here.send(value, parcel(value, 6))


def test_who_needs_nothing_more_does_not_ask_why_a_link_has_ended(
    pair: tuple[Neighbour, Neighbour], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread would ask the store while Python ends, which aborts the process."""
    here, there = pair
    asked: list[int | None] = []
    monkeypatch.setattr(there.all.control, "lost", asked.append)
    value = torch.ones(2)
    arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
    here.send(value, parcel(value))
    there.watch(0, arrived)
    assert arrived.get(timeout=10) == 0
    same(there.take(parcel(value)), value)
    here.link.shutdown(socket.SHUT_RDWR)
    assert there.reader is not None
    there.reader.join(10)
    assert there.gone
    assert not asked


@pytest.mark.parametrize(
    ("backend", "device"),
    [("gloo", "cpu"), ("nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cpu")],
)
def test_a_group_of_nccl_alone_sends_tensors_of_gpus(
    backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = str(c10d.BackendConfig(dist.Backend(backend)))
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    assert world.group_device() == torch.device(device)


def test_numbers_are_compared_on_the_device_of_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, sent = torch.device("cuda", 1), list[torch.device]()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(world, "group_device", lambda: device)
    monkeypatch.setattr(dist, "all_reduce", lambda value, _: sent.append(value.device))
    with FakeTensorMode():
        assert world.largest(torch.ones(3)).device.type == "cpu"
    assert sent == [device]
