"""Plans a model without training it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .backend import Backend
from .ir.modes import modes_after_errors
from .jobs.job import PlanError
from .jobs.schedule import Schedule
from .jobs.user_values import shown
from .options import PLANNED, Options, named_in_errors, parted, with_names
from .planning import plan_call
from .plans.plan import Plan
from .runtime.padding import check_padded


def plan(
    model: Callable[..., Any], schedule: Schedule, *args: Any, **kwargs: Any
) -> Plan:
    """Plans model(*args, **kwargs) by a schedule, without running anything.

    Keyword arguments may be options of fxsched.backend that a plan depends on; all
    others are passed to the model. One process plans for any number of workers. A model
    and inputs on the meta device, which has no memory, are planned as on the CPU,
    with the costs of device= if it is given.
    Raises PlanError for a model or schedule that can't be planned.
    """
    return Planner(model, *args, **kwargs).plan(schedule)


plan.__signature__ = with_names(plan, PLANNED)  # type: ignore[attr-defined]


class Planner:
    """Plans model(*args, **kwargs) by any schedules, as plan does; Dynamo traces the
    call once."""

    def __init__(self, model: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        check_model("plan", model)
        self.model, self.args = model, args
        self.own, self.kwargs = parted("plan", model, PLANNED, kwargs)
        self._compiled: dict[bool, tuple[_PlanOnly, Callable[..., Any]]] = {}

    def plan(self, schedule: Schedule, **own: Any) -> Plan:
        """The plan by a schedule. own: options for this plan alone, but for those that
        tracing reads, such as batch_dims."""
        with named_in_errors("plan"):
            options = Options(schedule, **self.own | own, transport="threads")
        cut = schedule.microbatches > 1  # else torch.export leaves no batch to cut
        if cut not in self._compiled:
            backend = _PlanOnly(options)
            compiled = torch.compile(self.model, backend=backend)
            self._compiled[cut] = backend, compiled
        backend, compiled = self._compiled[cut]
        backend.options, backend.request = options, options.request
        try:
            compiled(*self.args, **self.kwargs)
        except _Planned as planned:
            return planned.plan
        except PlanError:
            del self._compiled[cut]  # it may be traced otherwise by now
            raise
        raise no_graph("plan")


def explain(
    model: Callable[..., Any], schedule: Schedule, *args: Any, **kwargs: Any
) -> str:
    """Describes the stages of a plan, their costs, and what limits the step, as text.

    Takes the arguments of fxsched.plan.
    """
    return plan(model, schedule, *args, **kwargs).explain()


def check_model(call: str, model: object) -> None:
    """Raises PlanError for what torch.compile would stumble over, or change for good:
    compiling a class compiles all its instances."""
    if isinstance(model, Schedule):
        wanted = f"{call}(model, ...): the model comes first, here is a Schedule"
    elif isinstance(model, type):
        wanted = (
            f"{call}(model={model.__name__}): give a model, {model.__name__}(...), not "
            "its class"
        )
    elif callable(model):
        return
    else:
        given = f"{call}(model={shown(model)})"
        wanted = f"{given}: give an nn.Module or a function of tensors"
    raise PlanError(wanted)


def no_graph(what: str) -> PlanError:
    """What to raise where Dynamo traced nothing, so that there is no such thing."""
    return PlanError(
        f"Dynamo made no graph of the model, so there is no {what}; "
        "torch.compile(model, fullgraph=True) tells why"
    )


class _Planned(Exception):
    """Ends the call of a compiled function once there is a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan


class _PlanOnly(Backend):
    """A backend that stops at the plan."""

    def run(self, gm: fx.GraphModule, args: tuple[Any, ...]) -> Sequence[Any]:
        args, padded = self.sized(gm, args)
        with modes_after_errors():
            plan = plan_call(gm, args, self.options).plan
        if padded is not None:
            check_padded(gm, plan)
        raise _Planned(plan)
