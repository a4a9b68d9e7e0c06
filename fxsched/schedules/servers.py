"""Schedules whose workers fetch weights from servers and send gradients back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import networkx as nx

from ..jobs.job import Placement, PlanError
from ..jobs.schedule import Schedule
from ..jobs.user_values import flag, is_int, positive
from .arguments import constructor, equal_shares, groups, multiple
from .orders import microbatch_first


@constructor
def parameter_server(
    workers: int,
    microbatches: int | None = None,
    servers: int = 1,
    asynchronous: bool = False,
    staleness: int | None = None,
) -> Schedule:
    """The last workers, the servers, keep the weights; the others run the jobs.

    The other workers, the trainers, run whole microbatches: w = (T + s mod servers, b
    mod T), where T is the number of trainers. A trainer fetches a stage's weights for
    every job and sends their gradients back. By default one microbatch per trainer.
    DistBelief (Dean et al. 2012); Li et al. 2014, Scaling distributed machine learning
    with the parameter server.

    asynchronous: whether each microbatch has its own update: update_every = 1. Weights
        then have at least the trainer's last update: version = max(0, b + 1 - T). With
        order="dynamic" servers update in order of arrival, and trainers read the
        weights with the updates that have arrived. With "static", and in
        fxsched.simulate, updates run in the planned order.
    staleness: with asynchronous=True, how many updates a trainer may be ahead of the
        slowest trainer. None: any number (Downpour SGD, Dean et al. 2012). 1 or more:
        stale-synchronous parallel (Ho et al. 2013). 0: synchronous, with update_every =
        T: an update for each round of all trainers.
    """
    schedule = _served("parameter_server", workers, microbatches, servers)
    return _updating(schedule, servers, asynchronous, staleness)


@constructor
def sharded_parameter_server(
    workers: int,
    microbatches: int | None = None,
    servers: int = 2,
    asynchronous: bool = False,
    staleness: int | None = None,
) -> Schedule:
    """As parameter_server, with the stages dealt out to several servers.

    The servers share the traffic that a single server would have. By default two
    servers.

    Li et al. 2014, Scaling distributed machine learning with the parameter server.
    """
    schedule = _served("sharded_parameter_server", workers, microbatches, servers)
    return _updating(schedule, servers, asynchronous, staleness)


@constructor
def sharded_groups(
    workers: int, group_size: int, microbatches: int | None = None
) -> Schedule:
    """Stages are divided among G groups of R workers; each worker has its group's.

    w = (R (s mod G) + c mod R, c), c = b mod W.

    The opposite of hsdp: a worker keeps every G-th stage. It fetches each other stage
    from the worker in the same place of another group, so that one server has G - 1
    clients. G = W is fsdp, G = 1 is ddp. A worker's share is as in parameter servers
    that are also trainers (Li et al. 2014).
    """
    count = groups("sharded_groups", workers, group_size)
    microbatches = equal_shares("sharded_groups", workers, microbatches)

    def w(s: int, b: int, d: object) -> Placement:
        compute = b % workers
        return Placement(group_size * (s % count) + compute % group_size, compute)

    return Schedule(
        workers, microbatches, w=w, n=microbatch_first, name="sharded_groups"
    )


@constructor
def hybrid(
    workers: int,
    microbatches: int | None = None,
    sparse: Sequence[int] | None = None,
    servers: int = 0,
) -> Schedule:
    """As ddp, but only one worker keeps each stage of embedding tables.

    Each of the T workers that train, the trainers, keeps all other stages, and their
    gradients are averaged: w = (b mod T, b mod T). A trainer fetches the weights of the
    stages of tables, here called sparse, from the worker that keeps them. For the i-th
    sparse stage w = (i mod T, b mod T) or, with servers, (T + i mod servers, b mod T).

    sparse: the numbers of the sparse stages; () is ddp. None: the stages in which most
        weights are tables that only embeddings read. fxsched finds them when it cuts
        the model; without a model, stage 0 is sparse.
    servers: how many workers, the last ones, keep sparse stages and run no jobs. 0: the
        trainers keep the sparse stages too, as in the papers, where servers share the
        machines of trainers.

    Cut the model with backend(stages=) so that tables are in stages of their own. Whole
    tables and their whole gradients are sent, since embeddings with sparse=True are an
    error. Herring (Thangakrishnan et al. 2020, SC 20). Parallax (Kim et al. 2019, arXiv
    1808.02621) chooses by the sparsity of each variable.
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
            f"{name}(workers={workers}, servers={servers}): give workers="
            f"{servers + 1} or more, because servers run no jobs"
        )
    if microbatches is None:
        microbatches = trainers
    positive(name, microbatches=microbatches)
    call = f"{name}(workers={workers}, microbatches={microbatches}, servers={servers})"
    why = f"so that each of the {trainers} workers that train has as many"
    return trainers, multiple(call, "microbatches", microbatches, trainers, why)


def _updating(
    schedule: Schedule, servers: int, asynchronous: bool, staleness: int | None
) -> Schedule:
    """A parameter server with updates of single microbatches, if asynchronous."""
    name, trainers = schedule.name, schedule.workers - servers
    flag(str(name), asynchronous=asynchronous)
    if staleness is not None and not (is_int(staleness) and staleness >= 0):
        raise PlanError(
            f"{name}(staleness={staleness!r}): give an int of 0 or more, or None for "
            "any number of updates"
        )
    if not asynchronous:
        if staleness is not None:
            raise PlanError(
                f"{name}(staleness={staleness}): give asynchronous=True too, because "
                "staleness is about asynchronous updates"
            )
        return schedule
    if staleness == 0:
        return replace(schedule, update_every=trainers)
    return replace(
        schedule,
        update_every=1,
        version=lambda s, b, d: max(0, b + 1 - trainers),
        ahead=inf if staleness is None else staleness,
    )
