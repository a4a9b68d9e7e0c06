"""torch.distributed.pipelining on the two towers as a line, with its best split."""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from .measure import Batch, Contestant, measure, slowest
from .towers import Part, Stretch, TwoTowers, line

BYTES_PER_SECOND = 1e9  # of loopback, to weigh splits before they are tried
SHORTLIST = 500  # splits whose steps are worth a replay


def peer(
    kind: Any, model: TwoTowers, batch: Batch, count: int, cuts: Sequence[int]
) -> tuple[Contestant, Any]:
    """A schedule over the line, cut after so many parts each; and the schedule.

    Its stages take tokens from the batch, which every rank has, so only activations
    are carried; the loss is scaled in loss_fn, which is cheaper than on gradients.
    """
    model = copy.deepcopy(model)
    parts, stages = line(model), len(cuts) + 1
    bounds = list(itertools.pairwise([0, *cuts, len(parts)]))
    a, b, target = batch
    here = [
        PipelineStage(Stretch(parts[slice(*bounds[s])]), s, stages, torch.device("cpu"))
        for s in range(dist.get_rank(), stages, dist.get_world_size())
    ]
    schedule = kind(
        here if kind is ScheduleInterleaved1F1B else here[0],
        count,
        loss_fn=lambda out, wanted: F.mse_loss(_only(out), wanted) / count,
        scale_grads=False,
    )

    def step() -> None:
        schedule.step(a=a, b=b, target=target, return_outputs=False)

    split = [f"{parts[i].name}..{parts[j - 1].name}" for i, j in bounds]
    name = f"torch {kind.__name__.removeprefix('Schedule')}"
    return Contestant(name, model, step, " | ".join(split)), schedule


def _only(output: Any) -> Tensor:
    (tensor,) = output if isinstance(output, tuple) else (output,)
    return tensor  # type: ignore[no-any-return]


def best_peer(
    kind: Any, model: TwoTowers, batch: Batch, count: int, tries: int
) -> Contestant:
    """The peer with the fastest, in a short trial, of the most promising splits."""
    workers = dist.get_world_size()
    stages = 2 * workers if kind is ScheduleInterleaved1F1B else workers
    microbatch: Batch = tuple(x.chunk(count)[0] for x in batch)  # type: ignore[assignment]
    parts = line(copy.deepcopy(model))
    order = None
    if kind is ScheduleInterleaved1F1B:  # it runs what it lists; of any split the same
        _, schedule = peer(kind, model, batch, count, range(1, stages))
        order = schedule.pipeline_order
    promising = splits(*costs(parts, microbatch), stages, count, order)
    candidates = [peer(kind, model, batch, count, c)[0] for c in promising[:tries]]
    if len(candidates) == 1:
        return candidates[0]
    seconds = measure(candidates, 3)
    return min(candidates, key=lambda each: statistics.median(seconds[id(each)]))


def costs(parts: Sequence[Part], microbatch: Batch) -> tuple[list[float], list[int]]:
    """Seconds of F and B of each part, and the bytes that cross a cut after it.

    Every rank measures at the same time; the seconds are those of the slowest.
    """
    seconds, crossing = [], []
    carried: tuple[Tensor, ...] = ()
    a, b, _ = microbatch
    for part in parts:
        stage, taken = Stretch([part]), []
        for _ in range(5):
            start = time.perf_counter()
            out = stage(*carried, a=a, b=b)
            torch.autograd.backward(out, [torch.ones_like(x) for x in out])
            taken.append(time.perf_counter() - start)
        seconds.append(statistics.median(taken))
        carried = tuple(x.detach().requires_grad_() for x in out)
        crossing.append(sum(x.nbytes for x in carried))
    return slowest(seconds).tolist(), crossing


def splits(
    seconds: Sequence[float],
    crossing: Sequence[int],
    stages: int,
    count: int,
    order: dict[int, list[Any]] | None,
) -> list[tuple[int, ...]]:
    """Cuts into stages, best first by an estimate of a step's time.

    Without an order, for one stage a worker: the first microbatch passes every stage,
    the others follow as fast as the slowest stage.
    """
    workers = dist.get_world_size()
    sums = [0.0, *itertools.accumulate(seconds)]

    def loads(cuts: tuple[int, ...]) -> list[float]:
        bounds = [0, *cuts, len(seconds)]
        result = [sums[j] - sums[i] for i, j in itertools.pairwise(bounds)]
        for s, cut in enumerate(cuts):  # there in F and back in B, at both ends
            for end in (s, s + 1):
                result[end] += 2 * crossing[cut - 1] / BYTES_PER_SECOND
        return result

    def guess(cuts: tuple[int, ...]) -> float:
        work = loads(cuts)
        busiest = max(sum(work[w::workers]) for w in range(workers))
        return (count - 1) * busiest + sum(work)

    found = sorted(
        itertools.combinations(range(1, len(seconds)), stages - 1), key=guess
    )
    if order is None:
        return found
    return sorted(found[:SHORTLIST], key=lambda cuts: replay(order, loads(cuts)))


def replay(order: dict[int, list[Any]], loads: Sequence[float]) -> float:
    """Seconds of a step where each rank runs its list; B takes twice as long as F."""
    ends: dict[tuple[int, str, int], float] = {}
    clocks = dict.fromkeys(order, 0.0)
    left = {rank: [a for a in actions if a] for rank, actions in order.items()}
    while any(left.values()):
        before = len(ends)
        for rank, actions in left.items():
            while actions:
                s, direction, b = actions[0][:3]
                need: tuple[int, str, int] | None = (s - 1, "F", b) if s else None
                share = 1 / 3
                if direction == "B":
                    need = (s + 1, "B", b) if s + 1 < len(loads) else (s, "F", b)
                    share = 2 / 3
                if need is not None and need not in ends:
                    break
                start = max(clocks[rank], ends[need] if need else 0.0)
                clocks[rank] = ends[s, str(direction.value), b] = (
                    start + share * loads[s]
                )
                actions.pop(0)
        assert len(ends) > before, "the schedule's order stops"
    return max(clocks.values())
