"""What a schedule is given, checked."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from . import answers
from .job import PlanError
from .user_values import flag, is_count, is_int, is_number, positive

Fields = Mapping[str, Any]

# What functions of a schedule are called with; those of the first two are always there.
CALLED = {
    "w": answers.CALLED,
    "n": answers.CALLED,
    "fit": "the stages that returns a Schedule",
    "u": "(stage, microbatch)",
    "version": answers.CALLED,
    "rate": "the number of a stage",
    "drift": "the number of a stage",
}


def checked_fields(fields: Fields) -> dict[str, Any]:
    """Counts of a schedule as ints: numpy's are taken too; and its outer step.

    Raises PlanError for a field that can't be, and for some that don't go together.
    """
    counts = _counts(fields)
    _check_functions(fields)
    _check_updates(fields)
    _check_ahead(fields)
    _check_averaging(fields)
    outer = checked_averages("Schedule", fields["elastic"], fields["outer"])
    flag("Schedule", **{k: fields[k] for k in ("split_backward", "in_order")})
    if not all(_goes_with(each, fields) for each in fields["candidates"]):
        raise PlanError(
            f"Schedule(candidates=..): give a tuple of Schedules for "
            f"{fields['workers']} workers and {fields['microbatches']} microbatches"
        )
    cap = fields["in_flight"]
    if cap is not None and not callable(cap) and not is_count(cap, inf):
        raise PlanError(
            f"Schedule(in_flight={cap!r}): give None, an int of 1 or more, or a "
            "function of the stage"
        )
    some = {"in_flight": cap, "update_every": fields["update_every"]}
    counts |= {k: int(v) for k, v in some.items() if is_count(v, inf)}
    return {**counts, "outer": outer}


def _goes_with(candidate: Any, fields: Fields) -> bool:
    sizes = ("workers", "microbatches")
    return all(getattr(candidate, name, None) == fields[name] for name in sizes)


def _counts(fields: Fields) -> dict[str, int]:
    given = {k: fields[k] for k in ("workers", "microbatches", "stages", "shards")}
    if given["stages"] is None:
        del given["stages"]
    positive("Schedule", **given)
    counts = {field: int(count) for field, count in given.items()}
    if counts["shards"] > counts["workers"]:
        raise PlanError(
            f"Schedule(workers={counts['workers']}, shards={counts['shards']}): two "
            "shards of a stage would be on one worker; give at least as many workers "
            "as shards"
        )
    return counts


def _check_functions(fields: Fields) -> None:
    for field, called in CALLED.items():
        function, optional = fields[field], field not in ("w", "n")
        if not callable(function) and not (optional and function is None):
            raise PlanError(
                f"Schedule({field}={function!r}): give a function of {called}"
                f"{', or None' if optional else ''}"
            )


def _check_updates(fields: Fields) -> None:
    every = fields["update_every"]
    if every is None:
        for field in ("rate", "drift"):
            if fields[field] is not None:
                raise PlanError(
                    f"Schedule({field}=) is about updates in the program; give "
                    "update_every= too"
                )
    elif not is_count(every) or fields["microbatches"] % every:
        raise PlanError(
            f"Schedule(update_every={every!r}): give an int of 1 or more that "
            f"divides the {fields['microbatches']} microbatches, or None"
        )


def _check_ahead(fields: Fields) -> None:
    ahead, every = fields["ahead"], fields["update_every"]
    if ahead != inf and not (is_int(ahead) and ahead >= 0):
        raise PlanError(
            f"Schedule(ahead={ahead!r}): give an int of 0 or more, or math.inf"
        )
    if ahead and every != 1:
        raise PlanError(
            f"Schedule(ahead={ahead}, update_every={every}): in order of arrival an "
            "update is of one microbatch; give update_every=1"
        )
    planned = (fields[field] for field in ("rate", "drift", "average_every"))
    if ahead and any(each is not None for each in planned):
        raise PlanError(
            f"Schedule(ahead={ahead}) doesn't go with rate=, drift= or average_every=, "
            "which are about updates in the planned order; leave one of them out"
        )


def _check_averaging(fields: Fields) -> None:
    every = fields["average_every"]
    if every is None:
        for field in ("elastic", "outer"):
            if (given := fields[field]) is not None:
                raise PlanError(
                    f"Schedule({field}={given!r}): it says how replicas are averaged; "
                    "give average_every too, or None"
                )
        return
    parted = fields["update_every"]
    updates = 0 if parted is None else fields["microbatches"] // parted
    if not is_count(every) or not updates or updates % every:
        raise PlanError(
            f"Schedule(average_every={every!r}): give None, or an int of 1 or more "
            f"that divides the {updates} updates of a call, which ends with an average"
        )
    for field in ("u", "version", "rate", "drift"):
        if fields[field] is not None:
            raise PlanError(
                f"Schedule(average_every={every}): each replica takes its own steps "
                f"and reads its newest weights; leave {field}= out"
            )


def checked_averages(call: str, elastic: Any, outer: Any) -> tuple[float, float] | None:
    """The outer step, of the pair that a user gives to this call. Raises PlanError for
    a pair or an elastic that can't be."""
    if elastic is not None and (not is_number(elastic) or not 0 < elastic <= 1):
        raise PlanError(
            f"{call}(elastic={elastic!r}): give None, or a number above 0, 1 at most"
        )
    if outer is None:
        return None
    pair = isinstance(outer, (tuple, list)) and len(outer) == 2
    if not pair or not all(map(is_number, outer)) or not outer[0] or outer[1] >= 1:
        raise PlanError(
            f"{call}(outer={outer!r}): give None, or a pair (lr, momentum), lr above "
            "0, momentum from 0 and below 1"
        )
    if elastic is not None:
        raise PlanError(
            f"{call}(elastic={elastic!r}, outer={tuple(outer)!r}): each says how "
            "replicas are averaged; leave one of them out"
        )
    return float(outer[0]), float(outer[1])
