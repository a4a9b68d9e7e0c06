"""Replicas that train separately and are averaged after some updates."""

from __future__ import annotations

from dataclasses import replace

from ..jobs.fields import checked_averages
from ..jobs.schedule import Schedule
from ..jobs.user_values import positive
from .arguments import constructor, multiple
from .data_parallel import ddp


@constructor
def local_sgd(
    workers: int,
    every: int,
    microbatches: int | None = None,
    elastic: float | None = None,
    outer: tuple[float, float] | None = None,
) -> Schedule:
    """As ddp, but each worker updates its own replica of the weights.

    w = (b mod W, b mod W). Each update uses the gradient of one microbatch of the
    worker. After `every` updates all replicas are averaged. By default a call has W *
    every microbatches, so that it averages once. Parameter averaging (McDonald et al.
    2010, NAACL); local SGD (Stich 2019, arXiv 1805.09767). Momentum and other optimizer
    state are averaged with the weights (Yu, Jin, Yang 2019, arXiv 1905.03817).

    outer: (lr, momentum) of the outer optimizer of DiLoCo (Douillard et al. 2023, arXiv
        2311.08105), SGD with Nesterov momentum; see Schedule. The paper has (0.7, 0.9),
        AdamW for the replicas and every=500, and doesn't average AdamW's state. None
        for plain averages.
    elastic: alpha of elastic averaging, EASGD (Zhang et al. 2015, arXiv 1412.6651). At
        the end of a call, all workers get the weights of the centre. None for plain
        averages.
    """
    positive("local_sgd", workers=workers, every=every)
    each = workers * every
    count = each if microbatches is None else microbatches
    positive("local_sgd", microbatches=count)
    call = f"local_sgd(workers={workers}, every={every}, microbatches={count})"
    why = "so that a call ends with an average"
    multiple(call, "microbatches", count, each, why)
    checked_averages("local_sgd", elastic, outer)
    return replace(
        ddp(workers, count),
        update_every=workers,
        average_every=every,
        elastic=elastic,
        outer=outer,
        name="local_sgd",
    )
