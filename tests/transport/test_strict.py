"""transport="strict": the library by NCCL's rules, and what would hang under them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fxsched
from fxsched import PlanError, schedules
from fxsched.ir.graphs import Spec
from fxsched.ir.request import Transport
from fxsched.transport import strict
from fxsched.transport.endpoints import Aborted
from fxsched.transport.strict import StrictEndpoint, StrictExchange, TransferError
from fxsched.transport.wire_format import Parcel
from tests.cases import SCHEDULES, Tied
from tests.equality.test_equals_eager import LIBRARY, compiled, library
from tests.strict import run_faults, run_plans


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [*SCHEDULES, *LIBRARY])
@pytest.mark.parametrize("name", ["gpt", "two_tower"])
def test_the_library_equals_eager(
    name: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one queue, which is the hardest."""
    monkeypatch.setattr(strict, "QUEUES", 1)
    made = SCHEDULES[schedule]() if schedule in SCHEDULES else library(schedule)
    compiled(name, made, transport="strict")


@pytest.mark.parametrize("sums", ["pieces", "messages"])
def test_sums_are_made_by_one_thread(sums: str) -> None:
    compiled("gpt", schedules.ddp(4), transport="strict", sums=sums)


def parcel(peer: int, tag: int) -> Parcel:
    return Parcel(peer, tag, (Spec.of(torch.tensor(0.0)),), False, False)


def run(*workers: Callable[[StrictEndpoint], Any], queues: int = 8) -> list[Any]:
    """What each worker's calls give, or the error that ends them."""
    exchange, found = StrictExchange(len(workers), queues), list[Any](workers)

    def call(worker: int) -> None:
        endpoint = exchange.endpoint(worker)
        try:
            found[worker] = workers[worker](endpoint)
            endpoint.finish()
        except (TransferError, Aborted) as error:
            found[worker] = error
            exchange.abort()

    threads = [threading.Thread(target=call, args=(w,)) for w in range(len(workers))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(10)
        assert not each.is_alive()
    return found


def sends(*messages: tuple[int, int]) -> Callable[[StrictEndpoint], None]:
    def call(endpoint: StrictEndpoint) -> None:
        for peer, tag in messages:
            endpoint.send(torch.tensor(float(tag)), parcel(peer, tag))

    return call


def takes(*messages: tuple[int, int]) -> Callable[[StrictEndpoint], list[Any]]:
    def call(endpoint: StrictEndpoint) -> list[Any]:
        for peer, tag in messages:
            endpoint.expect(parcel(peer, tag))
        return [int(endpoint.take(parcel(peer, tag))) for peer, tag in messages]

    return call


def text(found: list[Any]) -> str:
    return str(next(each for each in found if isinstance(each, TransferError)))


def test_messages_meet_in_their_order() -> None:
    sender = sends((1, 5), (1, 3))
    assert run(sender, takes((0, 5), (0, 3)))[1] == [5, 3]
    says = text(run(sender, takes((0, 3), (0, 5))))
    assert says.startswith("transport='strict': worker 0 sends message 5 to worker 1")


def test_waits_in_vain_are_named() -> None:
    says = text(run(takes((1, 0)), takes((0, 1))))
    assert "worker 0 waits for message 0 to be sent by worker 1; worker 1 waits" in says
    says = text(run(sends(), takes((0, 4))))  # who should send has ended
    assert says.endswith("go on: worker 1 waits for message 4 to be sent by worker 0")


def test_the_first_of_a_queue_holds_up_the_others() -> None:
    """Between three workers: safe if each edge has a queue of its own."""
    workers = sends((2, 0), (1, 1)), takes((0, 1), (2, 2)), takes((0, 0))

    def second(endpoint: StrictEndpoint) -> list[Any]:
        endpoint.send(torch.tensor(2.0), parcel(1, 2))
        return takes((0, 0))(endpoint)

    assert run(*workers[:2], second)[1] == [1, 2]
    assert "no worker can go on" in text(run(*workers[:2], second, queues=1))


def test_connections_are_made_before_the_first_step() -> None:
    exchange = StrictExchange(3, open={(0, 1)})
    exchange.endpoint(0).send(torch.tensor(0.0), parcel(1, 4))
    with pytest.raises(TransferError, match=re.escape("worker 0 has no connection")):
        exchange.endpoint(0).send(torch.tensor(0.0), parcel(2, 5))


def test_transfers_under_way_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict, "UNDER_WAY", 2)
    says = text(run(sends((1, 0), (1, 1), (1, 2)), takes()))
    assert "worker 0 waits for room for one more send or receive" in says


@pytest.mark.slow
def test_random_plans_equal_eager_and_faults_are_found() -> None:
    assert run_plans(2, 0) == (8, 8)
    found = run_faults(6, 0)
    assert found.total() == 6 and not found["neither"]


def test_what_has_no_order_is_refused() -> None:
    with pytest.raises(PlanError, match=re.escape("order='dynamic'")):
        fxsched.backend(schedules.ddp(2), transport="strict", order="dynamic")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        (schedules.one_f_one_b(2, 4), {}),
        (schedules.sharded(schedules.one_f_one_b(2, 4), 2), {}),
        (schedules.zb_h1(2, 4), {"optimizer": torch.optim.AdamW}),
    ],
    ids=["global batch", "shards", "updates"],
)
def test_what_surrounds_jobs_equals_threads(
    schedule: fxsched.Schedule, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Global-batch stages and tied weights, sums of shards, updates."""
    monkeypatch.setattr(strict, "QUEUES", 1)
    x, y = (torch.randint(0, 20, (8,)) for _ in range(2))

    def trained(transport: Transport) -> list[Tensor]:
        torch.manual_seed(0)
        model, given = Tied(), dict(options)
        if "optimizer" in options:
            given["optimizer"] = options["optimizer"](model.parameters(), lr=0.1)
        with fxsched.backend(schedule, transport=transport, **given) as backend:
            step = torch.compile(model, backend=backend)
            for _ in range(3):
                loss = step(x, y)
                if "optimizer" not in options:
                    loss.backward()
        return [p.grad if p.grad is not None else p for p in model.parameters()]

    for mine, its in zip(trained("strict"), trained("threads"), strict=True):
        assert torch.equal(mine, its)
