"""What shards save of each worker's memory, and what they send each other for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import fx

from ..clock.memory import Memory, Peaks
from ..ir.meta import of_call
from ..ir.step import JobOutput, Message, Step
from ..jobs.job import Direction, Job
from ..jobs.user_values import counted
from .palette import clock
from .tables import WIDE, byte_text, columns, table, wrapped

MOMENTS = 2  # numbers that AdamW keeps of each weight
Reader = tuple[int, Direction]


class Load(NamedTuple):
    """What the workers of a plan that do something hold when that is most, and the
    seconds of its step."""

    held: Sequence[Memory]
    seconds: float


class Exchange(NamedTuple):
    """Bytes that the shards of all stages send each other in a step, in jobs F and in
    others, and the most that one worker sends of them."""

    forward: int
    backward: int
    most: int


class ShardCosts(NamedTuple):
    """A plan in shards beside one of the same schedule without; knows_state: whether
    the optimizer's state is that of the user's."""

    load: Load
    whole: Load
    exchange: Exchange
    knows_state: bool


def worker_load(
    peaks: Sequence[Peaks], trained: Sequence[int] | None, seconds: float
) -> Load:
    """What workers hold.

    trained: bytes of the weights that each updates, for AdamW's state; None where the
        peaks have the optimizer's.
    """
    held = [
        peak.at_once._replace(state=peak.at_once.state + MOMENTS * more)
        for peak, more in zip(peaks, trained or [0] * len(peaks), strict=True)
    ]
    return Load([each for each in held if each.total], seconds)


def shard_exchange(step: Step) -> Exchange:
    """What shards of one stage send each other, by the messages of a step."""
    by_direction, by_worker = [0, 0], [0] * step.jobs.workers
    readers: dict[fx.Node, list[Reader]] = {}
    for line in step.lines:
        if not isinstance(line, Message) or not isinstance(line.value, JobOutput):
            continue
        node, microbatch = line.value
        if node not in readers:
            readers[node] = _other_shards(node)
        ran = [
            d is Direction.FORWARD
            for stage, d in readers[node]
            if step.jobs.worker[step.jobs.number(Job(stage, microbatch, d))] == line.to
        ]
        if ran:
            size = line.bytes
            by_direction[not any(ran)] += size
            by_worker[line.source] += size
    forward, backward = by_direction
    return Exchange(forward, backward, max(by_worker))


def _other_shards(made: fx.Node) -> list[Reader]:
    """The calls of other shards of the same stage that read what a call makes."""
    own, found = of_call(made)["stage"], []
    users = list(made.users)
    for user in users:
        if user.op != "call_module":  # sums of gradients, and the like
            users += user.users
            continue
        stage = of_call(user)["stage"]
        if stage.stage == own.stage and stage.shard != own.shard:
            found.append((stage, of_call(user)["direction"]))
    return found


def shard_costs_text(costs: ShardCosts) -> Iterator[str]:
    """What workers hold in shards and without, and the price of it."""
    load, whole, exchange, knows_state = costs
    state = "the optimizer's state" if knows_state else "AdamW's state"
    kept = "activations, temporary"
    names = ("weights", "gradients", state, kept, "together")
    sides = [_kinds(each) for each in (*_most_and_mean(load), *_most_and_mean(whole))]
    rows = []
    for name, most, mean, whole_most, whole_mean in zip(names, *sides, strict=True):
        if most or whole_most:
            cells = (*_saved(most, whole_most), *_saved(mean, whole_mean))
            rows.append((name, *cells))
    headers = "held by a worker|most|without|saved|mean|without|saved"
    yield table(headers, rows, "lr")
    moments = "; AdamW's state: two numbers for each trained weight"
    assumed, time = "" if knows_state else moments, clock(load.seconds, "s").text
    yield wrapped(
        (
            "most: the worker with the largest peak; mean: all workers, each at its "
            f"peak; without: the same without shards, on {_workers(whole)}{assumed}",
            f"in a step, shards send each other {byte_text(exchange.forward)} in F and "
            f"{byte_text(exchange.backward)} in B; one worker sends at most "
            f"{byte_text(exchange.most)} of this; the predicted step takes "
            f"{time(load.seconds)} on {_workers(load)}; without shards, "
            f"{time(whole.seconds)} on {_workers(whole)}",
        ),
        columns(WIDE),
    )


def _workers(load: Load) -> str:
    return counted(len(load.held), "worker")


def _most_and_mean(load: Load) -> tuple[Memory, Memory]:
    """Of the worker that holds the most, and of all."""
    kinds = zip(*load.held, strict=True)
    mean = Memory(*(sum(kind) / len(load.held) for kind in kinds))
    return max(load.held, key=lambda memory: memory.total), mean


def _kinds(memory: Memory) -> tuple[float, ...]:
    weights = memory.weights + memory.versions + memory.fetched
    gradients, state, *kept = memory[3:]
    return weights, gradients, state, sum(kept), memory.total


def _saved(held: float, whole: float) -> tuple[str, str, str]:
    share = f"{100 * (1 - held / whole):.1f} %" if whole else ""
    return byte_text(held), byte_text(whole), share
