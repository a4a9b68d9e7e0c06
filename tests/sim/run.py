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


class Wires(Exchange):
    """Connections between workers of one run."""

    def __init__(self, workers: int, count: int | None = None) -> None:
        super().__init__()
        self.workers = [queues.Worker(w, count) for w in range(workers)]
        self.open: dict[tuple[int, int], list[queues.Transfer]] = {}
        self.waits = [0] * workers
        self.left_out: tuple[int, int] | None = None  # a wait: worker and number
        self.implied = False  # whether what it waits for came before it anyway

    def endpoint(self, worker: int) -> Any:
        return End(self, worker)


class End(OrderedEndpoint):
    def __init__(self, wires: Wires, worker: int) -> None:
        super().__init__(worker, device.DEVICE, lambda *edge: Way(wires, worker, edge))
        self.exchange = wires

    def fail(self, error: BaseException) -> None:
        self.exchange.abort()


class Way:
    """A worker's end of a connection, with a stream of its own, as NCCL's are."""

    def __init__(self, wires: Wires, worker: int, edge: tuple[int, int]) -> None:
        self.wires, self.worker, self.edge = wires, worker, edge

    def send(self, buffer: Tensor, tag: int) -> Posted:
        return self._post(buffer, tag, True)

    def receive(self, buffer: Tensor, tag: int) -> Posted:
        return self._post(buffer, tag, False)

    def _post(self, buffer: Tensor, tag: int, sends: bool) -> Posted:
        assert buffer.device.type == "sim", "no message is in memory of the host"
        own = self.wires.workers[self.worker]
        stream = own.stream(self.edge)
        stream.put(queues.Waits(queues.current_stream().mark()))
        name = f"message {tag} of {self.edge[0]} to {self.edge[1]}"
        item = queues.Transfer(name, device.raw(buffer), sends)
        with queues.lock:
            waiting = self.wires.open.setdefault(self.edge, [])
            other = next((each for each in waiting if each.sends != sends), None)
            if other is None:
                waiting.append(item)
            else:
                waiting.remove(other)
                assert other.name == name, f"{name} meets {other.name}"
                item.other, other.other = other, item
            stream.put(item)
        return Posted(self.wires, self.worker, item)


class Posted:
    def __init__(self, wires: Wires, worker: int, item: queues.Transfer) -> None:
        self.wires, self.worker, self.item = wires, worker, item

    def wait(self) -> None:
        number = self.wires.waits[self.worker]
        self.wires.waits[self.worker] += 1
        if (self.worker, number) != self.wires.left_out:
            queues.current_stream().put(queues.Waits(self.item))
            return
        queues.policy["last"] = {id(self.item), id(self.item.other)}
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
    advance, run = Threads.advance, Run.advance

    def wires(workers: int) -> Wires:
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
            queues.current_stream().launch(lambda: None, "the user", given)
            return results
        finally:
            device.memory.collect()
            queues.enter(None)

    def whole(self: Threads, runs: Any, tangents: Any) -> Any:
        queues.synchronize()
        try:
            return advance(self, runs, tangents)
        finally:
            queues.synchronize()

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
