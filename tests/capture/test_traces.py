"""Traces for Perfetto hold every job; comparisons say where two timelines part."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fxsched import Job, PlanError, schedules, simulate
from fxsched.clock.timeline import Event, Timeline
from fxsched.draw.chrome import write_trace
from fxsched.simulator.timeline_comparison import compare_timelines

SECONDS = {"F": 1e-3, "B": 2e-3}


PARTING = """\
from the first job to the last: predicted 18 ms, measured 29 ms, 1.61 times as long

order of jobs: the same on workers 0, 2; differs on

  worker    at job    predicted    measured
--------  --------  -----------  ----------
       1         3          1F2         1B1

durations of jobs, medians in ms

  stage    direction    predicted    measured    ratio
-------  -----------  -----------  ----------  -------
      0            B            2           2     1.00
      0            F            1           1     1.00
      1            B            2           4     2.00
      1            F            1           2     2.00
      2            B            2           2     1.00
      2            F            1           1     1.00

waits that differ most in ms

  worker    before job    predicted    measured
--------  ------------  -----------  ----------
       2           2F2            0           7
       0           0B2            1           7
       0           0B0            4           7
       1           1B2            0           1
       1           1B3            1           0"""


def timeline(seconds: Callable[[Job], float] | dict[str, float] = SECONDS) -> Timeline:
    return simulate(schedules.one_f_one_b(3, 4), durations=seconds).timeline


def slow_middle(job: Job) -> float:
    """Stage 1 takes twice as long."""
    return SECONDS[str(job.direction)] * (2 if job.stage == 1 else 1)


def read(path: Path) -> list[dict[str, Any]]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        found = json.load(file)
    assert set(found) == {"displayTimeUnit", "traceEvents"}
    events: list[dict[str, Any]] = found["traceEvents"]
    return events


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_trace_has_a_process_for_each_timeline(tmp_path: Path, name: str) -> None:
    predicted, measured = timeline(), timeline(slow_middle)
    later = [e._replace(start=e.start + 9, end=e.end + 9) for e in measured]
    write_trace(tmp_path / name, {"predicted": predicted, "measured": later})
    records = read(tmp_path / name)
    for process, expected in ((1, predicted), (2, measured)):
        slices = [r for r in records if r["ph"] == "X" and r["pid"] == process]
        for record, event in zip(slices, expected, strict=True):
            assert record["name"] == str(event.job)
            assert record["tid"] == event.worker
            assert record["ts"] == pytest.approx(event.start * 1e6, abs=1e-3)
            assert record["dur"] == pytest.approx(
                (event.end - event.start) * 1e6, abs=1e-3
            )
            assert record["args"] == {
                "stage": event.job.stage,
                "microbatch": event.job.microbatch,
                "direction": str(event.job.direction),
            }
            assert record["cat"] in ("forward", "backward") and record["cname"]


def test_processes_and_threads_have_names(tmp_path: Path) -> None:
    write_trace(tmp_path / "a.json", {"predicted": timeline()})
    records = [r for r in read(tmp_path / "a.json") if r["ph"] == "M"]
    names = [(r["name"], r["tid"], *r["args"].values()) for r in records]
    assert names[:2] == [
        ("process_name", 0, "predicted"),
        ("process_sort_index", 0, 1),
    ]
    assert [name[2] for name in names[2::2]] == ["worker 0", "worker 1", "worker 2"]


def test_a_unit_may_be_a_millisecond(tmp_path: Path) -> None:
    step = simulate(schedules.gpipe(2, 2))
    write_trace(tmp_path / "a.json", {"gpipe": step.timeline}, scale=1e3)
    ends = [r["ts"] + r["dur"] for r in read(tmp_path / "a.json") if r["ph"] == "X"]
    assert max(ends) == 1e3 * step.latency
    with pytest.raises(PlanError, match=r"scale=0\): give a number above 0"):
        write_trace(tmp_path / "a.json", {}, scale=0)


def test_an_empty_trace(tmp_path: Path) -> None:
    write_trace(tmp_path / "a.json", {"nothing": []})
    assert all(r["ph"] == "M" for r in read(tmp_path / "a.json"))


def test_where_two_timelines_part() -> None:
    assert compare_timelines(timeline(), timeline(slow_middle)) == PARTING


def test_equal_timelines_do_not_part() -> None:
    again = [e._replace(start=e.start + 5, end=e.end + 5) for e in timeline()]
    text = compare_timelines(timeline(), again)
    assert "1.00 times as long" in text
    assert "order of jobs: the same on every worker" in text
    assert "waits between jobs: the same" in text


@pytest.mark.slow
def test_a_comparison_fits_a_screen() -> None:
    schedule = schedules.lpp(64, 8, 128)
    one = simulate(schedule).timeline
    other = simulate(schedule, durations=lambda job: 1 + (7 * job.stage % 5)).timeline
    text = compare_timelines(one, other, unit="")
    assert len(text.splitlines()) <= 45
    assert max(map(len, text.splitlines())) <= 88
    assert "and 59 more" in text and "(8 of 128)" in text


def test_timelines_of_other_jobs_are_refused() -> None:
    events = list(timeline())
    with pytest.raises(PlanError, match="0F0 is in the predicted timeline and not in"):
        compare_timelines(events, events[1:])
    with pytest.raises(PlanError, match="0F0 is in the measured timeline and not in"):
        compare_timelines(events[1:], events)
    moved = [events[0]._replace(worker=2), *events[1:]]
    with pytest.raises(PlanError, match=r"0F0 is predicted on worker 0 .* worker 2"):
        compare_timelines(events, moved)
    with pytest.raises(PlanError, match="measured: 0F0 ran twice"):
        compare_timelines(events, [*events, events[0]])


def test_a_comparison_of_nothing() -> None:
    nothing: list[Event] = []
    assert compare_timelines(nothing, nothing) == "no jobs"
