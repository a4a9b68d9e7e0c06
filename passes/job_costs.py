"""What the jobs of stages take, in seconds and bytes; equal graphs are priced once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import fx

from ..autodiff.stage_graphs import StageGraphs
from ..autodiff.temporaries import Handed, job_moments
from ..ir.meta import Moments, of_node
from ..ir.request import Device
from ..jobs.job import Direction
from ..partition.costs import cost_of_nodes


class Seconds(NamedTuple):
    """What a flat graph should take: all of it, and what of F it computes again."""

    all: float
    again: float


class Backward(NamedTuple):
    """Seconds of B, without a whole F that runs again; of W; and of what they compute
    again of F."""

    now: float
    later: float
    again: float


class JobCosts:
    """Costs of jobs on a device; None for this machine."""

    def __init__(self, device: Device | None) -> None:
        self.device = device
        self.costs: dict[fx.GraphModule, Seconds] = {}
        self.known: dict[object, tuple[Moments, ...]] = {}

    def forward(self, pair: StageGraphs, measured: tuple[float, float] | None) -> float:
        """Seconds of F. measured: of F and of B, if they were."""
        return measured[0] if measured else self._seconds(pair.forward).all

    def backward(
        self, pair: StageGraphs, measured: tuple[float, float] | None
    ) -> Backward:
        """What B and W take. measured: as for forward."""
        assert pair.backward is not None
        graphs = [graph for graph in (pair.backward, pair.weight) if graph is not None]
        now, *later = (self._seconds(graph).all for graph in graphs)
        again = sum(self._seconds(graph).again for graph in graphs)
        if measured is None:
            return Backward(now, sum(later), again)
        forward, backward = measured
        again *= forward / (self._seconds(pair.forward).all or 1.0)
        scale = (backward + again) / ((now + sum(later)) or 1.0)
        return Backward(now * scale, sum(later) * scale, again)

    def _seconds(self, flat: fx.GraphModule) -> Seconds:
        if flat not in self.costs:
            every = list(flat.graph.nodes)
            again = [node for node in every if of_node(node).get("again")]
            costs = (cost_of_nodes(nodes, self.device) for nodes in (every, again))
            self.costs[flat] = Seconds(*(cost.seconds for cost in costs))
        return self.costs[flat]

    def moments(
        self,
        pair: StageGraphs,
        what: Direction | bool,
        module: fx.GraphModule,
        bundle: Sequence[Handed] = (),
        last: bool = False,
    ) -> tuple[Moments, ...]:
        """What a job takes while it runs; if it is the last of its stage, also where
        its gradients are added to sums. what: its direction, or whether B recomputes.
        """
        key = id(pair), what
        if key not in self.known:
            ways = (False, True)[: 1 + last]
            found = (job_moments(module, bundle, adds) for adds in ways)
            self.known[key] = tuple(found)
        return self.known[key]


def most(moments: tuple[Moments, ...]) -> float:
    """Bytes that a job takes at most, where its gradients are added to sums."""
    return max(size for _, size in moments[-1])
