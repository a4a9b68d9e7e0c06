"""Checks of replicas that take steps of their own and are averaged."""

from __future__ import annotations

from typing import Any

from .job import PlanError
from .user_values import is_count, is_number


def check_averaging(schedule: Any) -> None:
    """Raises PlanError for a wrong average_every or elastic, and for what they don't go
    with."""
    every, elastic = schedule.average_every, schedule.elastic
    if every is None:
        if elastic is not None:
            raise PlanError(
                f"Schedule(elastic={elastic!r}): it says how replicas are averaged; "
                "give average_every too, or None"
            )
        return
    parted = schedule.update_every
    updates = 0 if parted is None else schedule.microbatches // parted
    if not is_count(every) or not updates or updates % every:
        raise PlanError(
            f"Schedule(average_every={every!r}): give None, or an int of 1 or more "
            f"that divides the {updates} updates of a call, which ends with an average"
        )
    for field in ("u", "version", "rate", "drift"):
        if getattr(schedule, field) is not None:
            raise PlanError(
                f"Schedule(average_every={every}): each replica takes its own steps "
                f"and reads its newest weights; leave {field}= out"
            )
    if schedule.ahead:
        raise PlanError(
            f"Schedule(average_every={every}): replicas take their own updates, which "
            "come in no order of arrival; leave ahead= out"
        )
    if elastic is not None and (not is_number(elastic) or not 0 < elastic <= 1):
        raise PlanError(
            f"Schedule(elastic={elastic!r}): give None, or a number above 0, 1 at most"
        )
