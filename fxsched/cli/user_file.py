"""Models out of a user's file: `path/to/model.py:make` gives a model and its inputs,
and its optimizer, if the program is to have it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from ..dry_run import Planner, plan
from ..jobs.job import PlanError
from ..jobs.schedule import Schedule
from ..plans.plan import Plan
from .user_code import blamed, returned

if TYPE_CHECKING:
    from ..tuner.recommend import Recommendation

SAY = (
    "return (model, inputs), or (model, inputs, optimizer), where inputs are a tuple, "
    "a dict of keyword arguments, or one tensor"
)


@dataclass(frozen=True)
class Case:
    """A model, what it is called with, where it was found, and what steps it."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    file: str
    optimizer: Optimizer | None

    @cached_property
    def planner(self) -> Planner:
        """Plans the model, which is traced once."""
        kwargs = {**self.kwargs, "optimizer": self.optimizer}
        return Planner(self.model, *self.args, **kwargs)

    def planned(self, schedule: Schedule, options: Mapping[str, Any]) -> Plan:
        """The model's plan. options: of fxsched.plan."""
        with quiet_torch(), blamed(self.file, "the model raised"):
            return self.planner.plan(schedule, **options)

    def recommended(
        self, workers: int, microbatches: int | None, options: Mapping[str, Any]
    ) -> Recommendation:
        """What is recommended for the model; see fxsched.recommend."""
        from ..tuner.recommend import recommend

        kwargs = {**self.kwargs, **options, "optimizer": self.optimizer}
        kwargs["microbatches"] = microbatches
        with quiet_torch(), blamed(self.file, "the model raised"):
            return recommend(self.model, workers, *self.args, **kwargs)

    def searched(self, options: Mapping[str, Any], **sought: Any) -> Schedule:
        """The schedule that a search finds for the model. sought: see search."""
        from ..tuner.search import search

        kwargs = {**self.kwargs, **options, "optimizer": self.optimizer}
        with quiet_torch(), blamed(self.file, "the model raised"):
            return search(self.model, **sought, args=self.args, kwargs=kwargs)


def load(text: str) -> Case:
    """What `path/to/model.py:make` or `package.module:make` returns when called.

    Raises PlanError as user_code.returned, or if the function returns something else.
    """
    return _case(*returned(text))


def _case(result: Any, name: str, file: str) -> Case:
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        count = f" of {len(result)}" if isinstance(result, tuple) else ""
        raise PlanError(f"{name}() returned {type(result).__name__}{count}; {SAY}")
    model, inputs, optimizer = result if len(result) == 3 else (*result, None)
    if not (optimizer is None or isinstance(optimizer, Optimizer)):
        kind = type(optimizer).__name__
        raise PlanError(f"{name}() returned {kind} as the optimizer; {SAY}")
    if not callable(model):
        raise PlanError(f"{name}() returned {type(model).__name__} as the model; {SAY}")
    if isinstance(inputs, Tensor):
        return Case(model, (inputs,), {}, file, optimizer)
    if isinstance(inputs, (tuple, list)):
        return Case(model, tuple(inputs), {}, file, optimizer)
    if not isinstance(inputs, Mapping) or not all(isinstance(k, str) for k in inputs):
        raise PlanError(
            f"{name}() returned {type(inputs).__name__} as the inputs; {SAY}"
        )
    taken = sorted(set(inputs) & set(inspect.signature(plan).parameters))
    if taken:
        raise PlanError(
            f"{name}() returned the keyword argument {taken[0]!r}, which is also the "
            "name of an argument of fxsched.plan; give the inputs as a tuple"
        )
    return Case(model, (), dict(inputs), file, optimizer)


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Keeps torch from logging what it raises too."""
    log = logging.getLogger("torch")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
