"""What a rank writes of its last calls when one fails, as lines of JSON.

The first line of FOLDER/rank-3.jsonl is a Report, each other an Entry.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, TypeVar, get_origin, get_type_hints

from ..jobs.job import PlanError

Fields = TypeVar("Fields", "Heard", "Report", "Entry")
FILES = "rank-*.jsonl"
EARLIER = "earlier"  # the folder in FOLDER for what was there before a start


class Heard(NamedTuple):
    """What another rank had last said of itself.

    whom: the rank that it waited for; None for all, or none. silent: whether it had
    neither failed nor said anew that it waits.
    """

    rank: int
    text: str
    whom: int | None
    silent: bool


class Report(NamedTuple):
    """How a rank's call ended.

    time: seconds since 1970. own: whether the error came up here, and is not one of
        waiting for others. job: in which it failed or waited, or "".
    whom: the rank that it waited for, for how many seconds; None for all, or none.
    """

    rank: int
    workers: int
    time: float
    call: int
    error: str
    own: bool
    job: str
    whom: int | None
    waited: float
    heard: tuple[Heard, ...] = ()


class Entry(NamedTuple):
    """A job that "ran", or a message that was "sent" or that a rank "took".

    start, end: seconds since 1970; of a message that it took, of the wait for it.
    job: of messages, "". peer: the other rank; of jobs, None.
    """

    call: int
    what: str
    start: float
    end: float
    job: str = ""
    peer: int | None = None
    bytes: int = 0


class RankRecord(NamedTuple):
    """One rank's file."""

    report: Report
    entries: tuple[Entry, ...]


def write_record(folder: Path, report: Report, entries: Iterable[Entry]) -> None:
    """Writes a rank's file, in place of what was there. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    heard = [each._asdict() for each in report.heard]
    lines = [report._asdict() | {"heard": heard}]
    lines += [entry._asdict() for entry in entries]
    path = folder / f"rank-{report.rank}.jsonl"
    new = path.with_suffix(".new")
    new.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    new.replace(path)  # whole or not there


def put_away(folder: Path, ranks: Sequence[int], workers: int) -> None:
    """Moves what an earlier start left of these ranks to FOLDER/earlier; where rank 0
    is among them, also that of ranks that are none now. Raises OSError."""
    for path in sorted(folder.glob(FILES)):
        number = path.stem.removeprefix("rank-")
        old = number.isdecimal() and 0 in ranks and int(number) >= workers
        if old or number in map(str, ranks):
            (folder / EARLIER).mkdir(exist_ok=True)
            path.replace(folder / EARLIER / path.name)


def read_records(folder: Path) -> list[RankRecord]:
    """The files of a folder, by rank. Raises PlanError for what is none."""
    records = [_read(path) for path in folder.glob(FILES)]
    if not records:
        raise PlanError(
            f"{folder} has no rank-0.jsonl or the like; give the folder that "
            "backend(flight_record=) names, from all hosts"
        )
    workers = {record.report.workers for record in records}
    if len(workers) > 1:
        raise PlanError(
            f"{folder} has files of runs with {sorted(workers)} workers; give a folder "
            "of one run"
        )
    return sorted(records, key=lambda record: record.report.rank)


def _read(path: Path) -> RankRecord:
    first, *others = path.read_text(errors="replace").splitlines() or [""]
    number = 1
    try:
        report = _report(json.loads(first))
        entries = []
        for line in others:
            number += 1
            entries.append(_typed(Entry, json.loads(line)))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise PlanError(
            f"{path}, line {number}: no line of a flight record ({error}); "
            "give a folder that flight_record= wrote"
        ) from error
    return RankRecord(report, tuple(entries))


def _report(fields: dict[str, Any]) -> Report:
    heard = tuple(_typed(Heard, each) for each in fields.pop("heard"))
    report = _typed(Report, fields | {"heard": heard})
    if not 0 <= report.rank < report.workers:
        raise ValueError(f"rank {report.rank} of {report.workers}")
    return report


def _typed(kind: type[Fields], fields: dict[str, Any]) -> Fields:
    """A tuple of these fields. Raises TypeError for others, and for other types."""
    value = kind(**fields)
    for name, hint in get_type_hints(kind).items():
        allowed = {float: (int, float)}.get(hint, get_origin(hint) or hint)
        if get_origin(hint) is UnionType:
            allowed = hint
        if not isinstance(getattr(value, name), allowed):
            raise TypeError(f"{name}={getattr(value, name)!r}")
    return value
