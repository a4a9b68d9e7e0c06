"""Who was first when ranks failed, and whom the others waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..draw.tables import WIDTH, byte_text, table
from .record import Entry, RankRecord, Report

ROWS = 12  # of the table


def blame(records: Sequence[RankRecord]) -> str:
    """The culprit, the wait-for graph, and the last jobs and messages around it.

    An error of a rank's own is the cause, the earliest if there are several. Else it is
    a rank that went silent: one without a record, or that the others say so of.
    """
    reports = [record.report for record in records]
    culprit, said = _verdict(records)
    lines = [said, "", "the wait-for graph:"]
    lines += [f"  {_waited(report)}" for report in reports]
    lines += [f"  {line}" for line in _missing(reports)]
    rows = _rows(records, culprit)
    if rows:
        whom = "all ranks" if culprit is None else f"rank {culprit}"
        lines += ["", f"the last jobs and messages of {whom}, by seconds before it:"]
        lines += [table("s|rank|call|what", rows, "rrrl", WIDTH)]
    return "\n".join(lines)


def _verdict(records: Sequence[RankRecord]) -> tuple[int | None, str]:
    """The rank, if it is known, and what it did."""
    reports = [record.report for record in records]
    own = sorted((r for r in reports if r.own), key=lambda r: (r.time, r.rank))
    if own:
        first = own[0]
        if first.error.startswith("PlanError"):  # of all, about some
            return None, f"the ranks were not together, {_where(first)}"
        return first.rank, f"rank {first.rank} failed first, {_where(first)}"
    silent = _silent(records)
    if silent is None:
        return None, f"the ranks waited for each other, {_where(reports[0])}"
    if silent in {report.rank for report in reports}:
        why = "the others say that it waited for nobody"
    else:
        why = "it left no record: killed, frozen, cut off, or ended outside of a call"
    return silent, f"rank {silent} went silent first; {why}"


def _where(report: Report) -> str:
    job = f"in job {report.job} of " * bool(report.job)
    return f"{job}call {report.call}: {report.error}"


def _silent(records: Sequence[RankRecord]) -> int | None:
    """Who went silent first: of those without a record, that are waited for if there
    are such, the one that others have not heard of for longest; else the one that most
    others call silent."""
    reports = [record.report for record in records]
    missing = set(range(reports[0].workers)) - {report.rank for report in reports}
    waited = {whom for _, whom in _edges(reports)} & missing
    if missing:
        last = dict.fromkeys(waited or missing, 0.0)
        for entry in (entry for record in records for entry in record.entries):
            if entry.what == "took" and entry.peer in last:
                last[entry.peer] = max(last[entry.peer], entry.end)
        return min(last, key=lambda rank: (last[rank], rank))
    votes = Counter(h.rank for r in reports for h in r.heard if h.silent)
    if not votes:
        return None
    return min(votes, key=lambda rank: (-votes[rank], rank))


def _edges(reports: Sequence[Report]) -> list[tuple[int, int]]:
    """Who waited for whom, by its own record, or by what others heard of it."""
    waits = {h.rank: h.whom for r in reports for h in r.heard if not h.silent}
    waits |= {report.rank: report.whom for report in reports}
    return [(rank, whom) for rank, whom in waits.items() if whom is not None]


def _waited(report: Report) -> str:
    job = f"in job {report.job} of " * bool(report.job)
    at = f"{job}call {report.call}"
    if report.whom is not None:
        return (
            f"rank {report.rank} -> rank {report.whom}, for {report.waited:.3g} s, {at}"
        )
    if report.own:
        return f"rank {report.rank} waited for nobody, {at}"
    error = report.error.split("\n")[0]
    return f"rank {report.rank}, {at}: {error}"


def _missing(reports: Sequence[Report]) -> list[str]:
    """What others last heard of ranks without a record."""
    here = {report.rank for report in reports}
    heard = {h.rank: h for r in reports for h in r.heard if h.rank not in here}
    lines = []
    for rank in range(reports[0].workers):
        if rank in heard and not heard[rank].silent:
            lines.append(f"rank {rank}, as the others heard it: {heard[rank].text}")
        elif rank not in here:
            lines.append(f"rank {rank} waited for nobody that the others know of")
    return lines


def _rows(
    records: Sequence[RankRecord], culprit: int | None
) -> list[tuple[str, int, int, str]]:
    """The last entries of the culprit, or, if it left none, of others with it."""
    every = [(record.report.rank, e) for record in records for e in record.entries]
    about = [each for each in every if culprit in (None, each[0])]
    about = about or [each for each in every if each[1].peer == culprit]
    end = min(record.report.time for record in records)
    about.sort(key=lambda each: (each[1].end, each[0]))
    return [
        (f"{end - entry.end:.6f}", rank, entry.call, _what(entry))
        for rank, entry in about[-ROWS:]
    ]


def _what(entry: Entry) -> str:
    took = f"{1e3 * (entry.end - entry.start):.3f} ms"
    if entry.what == "ran":
        return f"ran {entry.job} in {took}"
    size = byte_text(entry.bytes)
    if entry.what == "sent":
        return f"sent {size} to {entry.peer}"
    return f"took {size} from {entry.peer} after {took}"
