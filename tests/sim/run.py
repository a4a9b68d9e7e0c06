"""Plans on the simulated device: threads whose messages go as those of NCCL do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._pytree import tree_leaves

from fxsched.runtime.run import Run
from fxsched.runtime.threads import Threads
from fxsched.transport.endpoints import Exchange
from fxsched.transport.ordered import OrderedEndpoint

from . import device, queues

Connected = tuple[int, int] | frozenset[int]  # an edge, or workers that add up sums


class Wires(Exchange):
    """Connections between workers of one run."""

    def __init__(self, workers: int, count: int | None = None) -> None:
        super().__init__()
        self.workers = [queues.Worker(w, count) for w in range(workers)]
        self.open: dict[Connected, list[list[queues.Transfer]]] = {}
        self.waits = [0] * workers
        self.left_out: tuple[int, int] | None = None  # a wait: worker and number
        self.left: queues.Transfer | None = None  # what it waits for
        self.implied = False  # whether that came before anyway, as other waits say

    def endpoint(self, worker: int) -> Any:
        return End(self, worker)


class End(OrderedEndpoint):
    def __init__(self, wires: Wires, worker: int) -> None:
        super().__init__(
            worker,
            device.DEVICE,
            lambda *edge: Way(wires, worker, edge),
            lambda workers: Way(wires, worker, frozenset(workers)),
        )
        self.exchange = wires

    def fail(self, error: BaseException) -> None:
        self.exchange.abort()


class Way:
    """A worker's end of a connection, with a stream of its own, as NCCL's are."""

    def __init__(self, wires: Wires, worker: int, way: Connected) -> None:
        self.wires, self.worker, self.way = wires, worker, way

    def send(self, buffer: Tensor, tag: int) -> Posted:
        return self._post(buffer, tag, queues.Transfer)

    def receive(self, buffer: Tensor, tag: int) -> Posted:
        return self._post(buffer, tag, queues.Transfer)

    def all_reduce(self, buffer: Tensor, tag: int) -> Posted:
        return self._post(buffer, tag, queues.Sum)

    def _post(self, buffer: Tensor, tag: int, kind: type[queues.Transfer]) -> Posted:
        assert buffer.device.type == "sim", "no message is in memory of the host"
        own = self.wires.workers[self.worker]
        stream = own.stream(self.way)
        stream.put(queues.Waits(queues.current_stream().mark()))
        name, size = f"{kind.__name__} {tag} of {self.way}", len(self.way)
        with queues.lock:
            waiting = self.wires.open.setdefault(self.way, [])
            parts = next((p for p in waiting if self.worker not in _of(p)), None)
            if parts is None:
                waiting.append(parts := [])
            item = kind(name, device.raw(buffer), parts, size, self.worker)
            assert not parts or parts[0].name == name, f"{name} meets {parts[0].name}"
            parts.append(item)
            workers = self.way if isinstance(self.way, tuple) else sorted(self.way)
            parts.sort(key=lambda each: workers.index(each.worker))
            if len(parts) == size:
                waiting.remove(parts)
            stream.put(queues.Item("begin", item.begin))
            stream.put(item)
        return Posted(self.wires, self.worker, item)


def _of(parts: list[queues.Transfer]) -> set[int]:
    """The workers that have come to a transfer."""
    return {each.worker for each in parts}


class Posted:
    def __init__(self, wires: Wires, worker: int, item: queues.Transfer) -> None:
        self.wires, self.worker, self.item = wires, worker, item

    def wait(self) -> None:
        number = self.wires.waits[self.worker]
        self.wires.waits[self.worker] += 1
        if (self.worker, number) != self.wires.left_out:
            queues.current_stream().put(queues.Waits(self.item))
            return
        queues.policy["last"] = {*map(id, self.item.parts)}
        self.wires.left = self.item
        queues.current_stream().put(queues.Item("left out", self._look))

    def _look(self) -> None:
        self.wires.implied = self.item.done

    def is_completed(self) -> bool:
        return self.item.done


def _on_device(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "sim"


@contextlib.contextmanager
def simulated(
    count: int | None = None,
    late: bool = False,
    seed: int = 0,
    left_out: tuple[int, int] | None = None,
) -> Iterator[list[Wires]]:
    """transport="strict" runs on the device. count: hardware queues of a worker.
    late: messages last. left_out: which wait, of a call, isn't made."""

    made: list[Wires] = []
    seen: list[tuple[list[Tensor], list[Tensor]]] = []  # results, and as first read
    advance, run = Threads.advance, Run.advance

    def wires(workers: int, open: object) -> Wires:
        made.append(Wires(workers, count))
        made[-1].left_out = left_out
        return made[-1]

    def worker(self: Run, tangents: Any = None) -> Any:
        queues.enter(self.endpoint.exchange.workers[self.worker])
        try:
            results = run(self, tangents)
            given = [
                device.raw(each) for each in tree_leaves(results) if _on_device(each)
            ]
            taken = [*given]

            def take(wires: Wires = self.endpoint.exchange) -> None:
                taken[:] = [each.clone() for each in given]
                if wires.left is not None and wires.left_out[0] == self.worker:
                    wires.implied |= wires.left.done

            queues.current_stream().launch(take, "the user", given)
            seen.append((given, taken))
            return results
        finally:
            device.memory.collect()
            queues.enter(None)

    def whole(self: Threads, runs: Any, tangents: Any) -> Any:
        queues.synchronize()
        try:
            results = advance(self, runs, tangents)
        finally:
            queues.synchronize()
        for given, taken in seen:
            for one, other in zip(given, taken, strict=True):
                if not one.equal(other) and not one.isnan().any():
                    queues.poisoned.append("the user, too early,")
        seen.clear()
        return results

    queues.policy.update(late=late, last=set())
    queues.policy["draw"].seed(seed)
    with (
        mock.patch("fxsched.runtime.threads.StrictExchange", wires),
        mock.patch("fxsched.runtime.threads.StrictEndpoint", End),
        mock.patch.object(Threads, "advance", whole),
        mock.patch.object(Run, "advance", worker),
    ):
        try:
            yield made
        finally:
            queues.forget()
