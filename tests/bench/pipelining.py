"""torch.distributed.pipelining on a model as a line of parts, with its best split."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from .measure import Contestant, measure, slowest

BYTES_PER_SECOND = 1e9  # of loopback, to weigh splits before they are tried
LISTS = (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble)  # take all stages
SHORTLIST = 500  # splits whose steps are worth a replay


class Line(NamedTuple):
    """A model as parts that follow each other, and a batch for it.

    parts: what isn't cut, each with a name; they share the model's parameters.
    stage: a module of some parts in a row. It takes the tensors on their way and, by
        keyword, the inputs, which every rank has, so that only activations are carried.
    loss: of what the last stage gives and the target, a mean over the batch.
    """

    model: nn.Module
    parts: Sequence[Any]
    stage: Callable[[Sequence[Any]], nn.Module]
    inputs: dict[str, Tensor]
    target: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]

    def microbatch(self, count: int) -> Line:
        """The same with the first of so many microbatches."""
        inputs = {name: x.chunk(count)[0] for name, x in self.inputs.items()}
        return self._replace(inputs=inputs, target=self.target.chunk(count)[0])


def peer(
    kind: Any, line: Line, count: int, cuts: Sequence[int], compiled: bool = False
) -> tuple[Contestant, Any]:
    """A schedule over the line, cut after so many parts each; and the schedule.

    The loss is scaled in loss_fn, which is cheaper than on gradients.
    """
    stages = len(cuts) + 1
    bounds = list(itertools.pairwise([0, *cuts, len(line.parts)]))
    here = []
    for s in range(dist.get_rank(), stages, dist.get_world_size()):
        stage = line.stage(line.parts[slice(*bounds[s])])
        if compiled:
            stage.compile()
        here.append(PipelineStage(stage, s, stages, line.target.device))
    schedule = kind(
        here if kind in LISTS else here[0],
        count,
        loss_fn=lambda out, wanted: line.loss(_only(out), wanted) / count,
        scale_grads=False,
    )

    def step() -> None:
        schedule.step(**line.inputs, target=line.target, return_outputs=False)

    split = [f"{line.parts[i].name}..{line.parts[j - 1].name}" for i, j in bounds]
    name = f"torch {kind.__name__.removeprefix('Schedule')}"
    return Contestant(name, line.model, step, " | ".join(split)), schedule


def _only(output: Any) -> Tensor:
    (tensor,) = output if isinstance(output, tuple) else (output,)
    return tensor  # type: ignore[no-any-return]


def best_cuts(
    kind: Any, make: Callable[[], Line], count: int, tries: int, compiled: bool = False
) -> tuple[int, ...]:
    """Where the line is cut best: the fastest, in a short trial, of the most promising
    splits. Each try gets a line of its own."""
    workers = dist.get_world_size()
    stages = 2 * workers if kind is ScheduleInterleaved1F1B else workers
    order = None
    if kind is ScheduleInterleaved1F1B:  # it runs what it lists; of any split the same
        _, schedule = peer(kind, make(), count, range(1, stages))
        order = schedule.pipeline_order
    line = make().microbatch(count)
    promising = splits(*costs(line), stages, count, order)[:tries]
    if len(promising) == 1:
        return promising[0]
    candidates = [peer(kind, make(), count, c, compiled)[0] for c in promising]
    seconds = measure(candidates, 3)
    medians = [statistics.median(seconds[id(each)]) for each in candidates]
    return promising[medians.index(min(medians))]


def costs(line: Line) -> tuple[list[float], list[int]]:
    """Seconds of F and B of each part, and the bytes that cross a cut after it.

    Every rank measures at the same time; the seconds are those of the slowest.
    """
    seconds, crossing = [], []
    carried: tuple[Tensor, ...] = ()
    for part in line.parts:
        stage, taken = line.stage([part]), []
        for _ in range(5):
            start = time.perf_counter()
            out = stage(*carried, **line.inputs)
            out = out if isinstance(out, tuple) else (out,)
            if part is line.parts[-1]:
                out = (line.loss(_only(out), line.target),)
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
