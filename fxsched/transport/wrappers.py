"""Modules that share out a model over ranks or devices by themselves: said before any
of their sums meets a schedule's."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..jobs.job import PlanError

WRAPPERS = {
    DistributedDataParallel: "DistributedDataParallel",
    FullyShardedDataParallel: "FullyShardedDataParallel",
    FSDPModule: "fully_shard",
    DataParallel: "DataParallel",
}
INSTEAD = (
    "replicas, shards and sums of gradients are the schedule's: schedules.ddp, "
    "schedules.fsdp, or replicate() of any"
)


def refuse_wrappers(model: object) -> None:
    """Raises PlanError if a module, or one in it, is shared out already."""
    if not isinstance(model, nn.Module):
        return
    for place, what in _shared_out(model):
        where = f"the model's {place}" if place else "the model"
        raise PlanError(
            f"{where} is wrapped in {what}; give "
            f"torch.compile the model as it is: {INSTEAD}"
        )


def _shared_out(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Modules, or parameters, that are, and by what."""
    for place, module in model.named_modules():
        for kind, name in WRAPPERS.items():
            if isinstance(module, kind):
                yield place, name
    for place, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            yield place, "a DTensor"


def refuse_outer_ddp() -> None:
    """Raises PlanError inside DistributedDataParallel's forward, whose backward would
    average gradients that the ranks have summed, or don't have."""
    if DistributedDataParallel._get_active_ddp_module() is not None:  # type: ignore[no-untyped-call]
        raise PlanError(
            "the compiled model is called by DistributedDataParallel, which would "
            "average the schedule's gradients once more; call the compiled model "
            f"itself: {INSTEAD}"
        )
