"""Schedules whose workers fetch weights from servers, and return gradients to them."""

from __future__ import annotations

from ..jobs.job import Placement, PlanError
from ..jobs.schedule import Schedule
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


def hybrid(workers: int, group_size: int, microbatches: int | None = None) -> Schedule:
    """Each group of R workers serves its share of the stages to the other groups, and
    inside it each worker has a replica: w = (R (s mod G) + c mod R, c), c = b mod W.

    The other way round than hsdp: a worker keeps every G-th stage, and fetches the
    others from the workers in its own place of other groups, one server for G - 1
    clients. G = W is fsdp, G = 1 is ddp. A worker's share is as in parameter servers
    that are trainers too (Li et al. 2014).
    """
    count = groups("hybrid", workers, group_size)
    microbatches = equal_shares("hybrid", workers, microbatches)

    def w(s: int, b: int, d: object) -> Placement:
        compute = b % workers
        return Placement(group_size * (s % count) + compute % group_size, compute)

    return Schedule(workers, microbatches, w=w, n=microbatch_first, name="hybrid")


def _served(
    name: str, workers: int, microbatches: int | None, servers: int
) -> Schedule:
    positive(name, workers=workers, servers=servers)
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
    return Schedule(
        workers,
        microbatches,
        w=lambda s, b, d: Placement(trainers + s % servers, b % trainers),
        n=microbatch_first,
        name=name,
    )
