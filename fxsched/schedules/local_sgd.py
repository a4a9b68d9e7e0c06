"""Replicas that train alone and are averaged now and then."""

from __future__ import annotations

from dataclasses import replace

from ..jobs.schedule import Schedule
from .arguments import equal_shares, positive
from .data_parallel import ddp


def local_sgd(
    workers: int,
    every: int,
    microbatches: int | None = None,
    elastic: float | None = None,
) -> Schedule:
    """As ddp, w = (b mod W, b mod W), but each worker steps its own replica, with the
    gradient of one microbatch of its own, and after `every` steps all are averaged.

    Microbatches for one averaging a call, W every, unless given. Parameter averaging
    (McDonald et al. 2010, NAACL); local SGD (Stich 2019, arXiv 1805.09767). Momentum
    and the like are averaged with the weights (Yu, Jin, Yang 2019, arXiv 1905.03817).

    elastic: alpha of elastic averaging, EASGD (Zhang et al. 2015, arXiv 1412.6651), of
        which the centre is what a call leaves; None for plain averages.
    """
    positive("local_sgd", workers=workers, every=every)
    count = workers * every if microbatches is None else microbatches
    count = equal_shares("local_sgd", workers, count)
    return replace(
        ddp(workers, count),
        update_every=workers,
        average_every=every,
        elastic=elastic,
        name="local_sgd",
    )
