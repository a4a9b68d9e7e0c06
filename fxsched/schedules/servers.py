"""Schedules whose workers fetch weights from servers, and return gradients to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import networkx as nx

from ..jobs.job import Placement, PlanError
from ..jobs.schedule import Schedule
from ..jobs.user_values import is_int
from .arguments import equal_shares, groups, positive
from .orders import microbatch_first


def parameter_server(
    workers: int, microbatches: int | None = None, servers: int = 1
) -> Schedule:
    """The last workers keep the weights and run nothing; the others run whole
    microbatches: w = (T + s mod servers, b mod T), where T is how many others.

    A trainer fetches a stage's weights for every job and returns their gradients. One
    microbatch a trainer unless given. DistBelief (Dean et al. 2012); Li et al. 2014,
    Scaling distributed machine learning with the parameter server.
    """
    return _served("parameter_server", workers, microbatches, servers)


def sharded_parameter_server(
    workers: int, microbatches: int | None = None, servers: int = 2
) -> Schedule:
    """parameter_server with the stages dealt out to several servers, which share the
    traffic that one would have alone. Two servers unless given.

    Li et al. 2014, Scaling distributed machine learning with the parameter server.
    """
    return _served("sharded_parameter_server", workers, microbatches, servers)


def sharded_groups(
    workers: int, group_size: int, microbatches: int | None = None
) -> Schedule:
    """Each group of R workers serves its share of the stages to the other groups, and
    inside it each worker has a replica: w = (R (s mod G) + c mod R, c), c = b mod W.

    The other way round than hsdp: a worker keeps every G-th stage, and fetches the
    others from the workers in its own place of other groups, one server for G - 1
    clients. G = W is fsdp, G = 1 is ddp. A worker's share is as in parameter servers
    that are trainers too (Li et al. 2014).
    """
    count = groups("sharded_groups", workers, group_size)
    microbatches = equal_shares("sharded_groups", workers, microbatches)

    def w(s: int, b: int, d: object) -> Placement:
        compute = b % workers
        return Placement(group_size * (s % count) + compute % group_size, compute)

    return Schedule(
        workers, microbatches, w=w, n=microbatch_first, name="sharded_groups"
    )


def hybrid(
    workers: int,
    microbatches: int | None = None,
    sparse: Sequence[int] | None = None,
    servers: int = 0,
) -> Schedule:
    """Stages of embedding tables through servers, all others replicas, whose gradients
    are averaged all to all: with T trainers, w = (b mod T, b mod T), and for the i-th
    sparse stage w = (i mod T, b mod T), or (T + i mod servers, b mod T).

    sparse: numbers of stages; () is ddp. None takes those whose weights are for the
        most part tables that embeddings alone read, once a model is cut, and stage 0
        where there is no model.
    servers: workers, the last ones, that keep sparse stages and run nothing; 0 for
        trainers that keep them too, as servers share their trainers' machines there.

    The placement is by stage: backend(stages=) names cuts that part tables from the
    rest. A table's weights and gradients are sent whole, as embeddings with sparse=True
    are refused. Herring (Thangakrishnan et al. 2020, SC 20); which of the two ways
    a variable goes by its sparsity: Parallax (Kim et al. 2019, arXiv 1808.02621).
    """
    trainers, microbatches = _trainers("hybrid", workers, microbatches, servers)
    numbers = _stage_numbers(sparse)

    def built(numbers: Sequence[int]) -> Schedule:
        def w(s: int, b: int, d: object) -> Placement:
            trainer = b % trainers
            if s not in numbers:
                return Placement(trainer, trainer)
            i = numbers.index(s)
            return Placement(
                trainers + i % servers if servers else i % trainers, trainer
            )

        return Schedule(workers, microbatches, w=w, n=microbatch_first, name="hybrid")

    if numbers is not None:
        return built(numbers)
    return replace(built((0,)), fit=lambda stages: built(_tables(stages)))


def _tables(stages: nx.DiGraph[int]) -> tuple[int, ...]:
    """The stages whose weights are for the most part tables; stage 0 where nothing is
    said of any."""
    data = stages.nodes
    if not any("tables" in data[s] for s in stages):
        return (0,)
    return tuple(
        s for s in sorted(stages) if data[s]["tables"] > data[s]["weights"] / 2
    )


def _stage_numbers(sparse: object) -> Sequence[int] | None:
    if sparse is None:
        return None
    if not isinstance(sparse, tuple | list | range) or not all(
        is_int(s) and s >= 0 for s in sparse
    ):
        raise PlanError(
            f"hybrid(sparse={sparse!r}): give numbers of stages, as in (0, 2), or None "
            "for those of embedding tables"
        )
    return tuple(int(s) for s in sparse)


def _served(
    name: str, workers: int, microbatches: int | None, servers: int
) -> Schedule:
    positive(name, servers=servers)
    trainers, microbatches = _trainers(name, workers, microbatches, servers)
    return Schedule(
        workers,
        microbatches,
        w=lambda s, b, d: Placement(trainers + s % servers, b % trainers),
        n=microbatch_first,
        name=name,
    )


def _trainers(
    name: str, workers: int, microbatches: int | None, servers: int
) -> tuple[int, int]:
    """How many workers train, and the microbatches, one for each of them unless
    given."""
    positive(name, workers=workers)
    if servers:
        positive(name, servers=servers)
    trainers = workers - servers
    if trainers < 1:
        raise PlanError(
            f"{name}(workers={workers}, servers={servers}): servers run no jobs, so "
            "give more workers than servers"
        )
    if microbatches is None:
        microbatches = trainers
    positive(name, microbatches=microbatches)
    if microbatches % trainers:
        raise PlanError(
            f"{name}(workers={workers}, microbatches={microbatches}, "
            f"servers={servers}): {trainers} workers train; give a multiple of that "
            "many microbatches"
        )
    return trainers, microbatches
