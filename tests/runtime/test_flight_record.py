"""The record of a failed step, and whom `fxsched blame` blames."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fxsched
from fxsched import PlanError, schedules
from fxsched.cli import main as cli
from fxsched.ir.request import Order
from fxsched.runtime.blame import blame
from fxsched.runtime.record import (
    Entry,
    Heard,
    RankRecord,
    Report,
    put_away,
    read_records,
    write_record,
)
from tests.ranks_faults import Words

LATE = "TimeoutError: rank 0 waited 3 s"


def waits(rank: int, whom: int | None, *heard: Heard) -> Report:
    return Report(rank, 3, 100.0, 7, LATE, False, "1F0", whom, 3.0, heard)


def test_a_rank_without_a_record_that_others_wait_for_went_silent() -> None:
    took = Entry(6, "took", 96.0, 97.0, "", 1, 2048)
    ran = Entry(7, "ran", 98.0, 99.0, "2F0")
    records = [
        RankRecord(waits(0, 2), (ran,)),
        RankRecord(waits(2, 1), (took,)),
    ]
    text = blame(records)
    assert text.startswith("rank 1 went silent first; it left no record: killed, ")
    graph, rows = text.split("\n\n")[1:]
    assert graph.split("\n") == [
        "the wait-for graph:",
        "  rank 0 -> rank 2, for 3 s, in job 1F0 of call 7",
        "  rank 2 -> rank 1, for 3 s, in job 1F0 of call 7",
        "  rank 1 waited for nobody that the others know of",
    ]
    assert [line.split(maxsplit=3) for line in rows.split("\n")[3:]] == [
        ["3.000000", "2", "6", "took 2.0 KiB from 1 after 1000.000 ms"]
    ]


def test_of_two_without_a_record_the_one_last_heard_of_earlier_was_first() -> None:
    early, late = (
        Entry(6, "took", 90.0, end, "", rank) for rank, end in ((2, 91.0), (1, 92.0))
    )
    text = blame([RankRecord(waits(0, None), (early, late))])
    assert text.startswith("rank 2 went silent first")


def test_an_error_of_its_own_comes_before_silence() -> None:
    own = waits(1, None)._replace(own=True, error="Fault: planted", time=99.0)
    lost = waits(0, 1)._replace(error="ConnectionError: rank 1 failed")
    text = blame([RankRecord(lost, ()), RankRecord(own, ())])  # 2 has left no record
    first = "rank 1 failed first, in job 1F0 of call 7: Fault: planted"
    assert text.split("\n")[0] == first
    assert "  rank 1 waited for nobody, in job 1F0 of call 7" in text


def test_a_rank_that_wakes_up_again_is_blamed_by_the_others() -> None:
    silent = Heard(1, "", None, True)
    reports = [waits(0, 2, silent), waits(1, 0), waits(2, 1, silent)]
    text = blame([RankRecord(report, ()) for report in reports])
    assert text.startswith("rank 1 went silent first; the others say that it waited")


def test_ranks_that_wait_for_each_other_are_said_to() -> None:
    reports = [waits(rank, (rank + 1) % 3) for rank in range(3)]
    text = blame([RankRecord(report, ()) for report in reports])
    assert text.startswith("the ranks waited for each other, in job 1F0 of call 7")


def test_ranks_that_are_apart_share_the_blame() -> None:
    own = waits(0, None)._replace(own=True, job="", error="PlanError: call 7 is for x")
    text = blame([RankRecord(own, ())])
    assert text.startswith("the ranks were not together, call 7: PlanError: call 7")


@pytest.mark.parametrize("order", ["static", "dynamic"])
def test_a_failed_call_is_recorded_and_blamed(
    order: Order, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = torch.tensor([[1], [2], [3], [99]])
    schedule, folder = schedules.gpipe(2, 2), tmp_path / "new"
    with fxsched.backend(
        schedule, ["head"], order=order, flight_record=folder
    ) as backend:
        step = torch.compile(Words(), backend=backend)
        for _ in range(4):
            step(wrong % 16).backward()
        assert not (folder).exists()
        with pytest.raises(IndexError) as raised:
            step(wrong)
    notes = "\n".join(raised.value.__notes__)
    assert notes.count("fxsched: flight record") == 1
    assert f"fxsched blame {tmp_path / 'new'}" in notes
    first, second = read_records(folder)
    assert {entry.call for entry in first.entries} == {3, 4, 5}
    third = [entry for entry in first.entries if entry.call == 3]
    ran = sorted(entry.job for entry in third if entry.what == "ran")
    assert ran == ["0B0", "0B1", "0F0", "0F1"]
    assert [e.peer for e in third if e.what == "took"][:2] == [1, 1]
    assert (second.report.own, second.report.error) == (False, "another worker failed")
    cli.main(["blame", str(folder)])
    said = capsys.readouterr().out
    assert said.startswith("rank 0 failed first, in job 0F1 of call 5: IndexError")
    assert "rank 1 -> rank 0, for " in said and "ran 0F0 in" in said


def test_what_an_earlier_start_left_is_put_away(tmp_path: Path) -> None:
    for rank in range(4):
        write_record(tmp_path, waits(rank, None), [])
    put_away(tmp_path, [0], 3)
    left = sorted(path.name for path in tmp_path.glob("*.jsonl"))
    assert left == ["rank-1.jsonl", "rank-2.jsonl"]
    moved = sorted(path.name for path in (tmp_path / "earlier").iterdir())
    assert moved == ["rank-0.jsonl", "rank-3.jsonl"]


GOOD = json.dumps(waits(0, None)._asdict())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "has no rank-0.jsonl or the like"),
        ("", "line 1: no line of a flight record"),
        ("{}", "line 1: no line of a flight record ('heard')"),
        (f"{GOOD}\nnonsense", "line 2: no line of a flight record"),
        (GOOD.replace('"rank": 0', '"rank": "a"'), "(rank='a')"),
        (GOOD.replace('"rank": 0', '"rank": 3'), "(rank 3 of 3)"),
    ],
)
def test_bad_input_is_one_line(
    text: str | None,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if text is not None:
        (tmp_path / "rank-0.jsonl").write_text(text)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["blame", str(tmp_path)])
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_files_of_two_runs_are_refused(tmp_path: Path) -> None:
    write_record(tmp_path, waits(0, None), [])
    write_record(tmp_path, waits(1, None)._replace(workers=2), [])
    with pytest.raises(PlanError, match=r"files of runs with \[2, 3\] workers"):
        read_records(tmp_path)


@pytest.mark.parametrize("folder", ["", 3, __file__])
def test_the_folder_must_be_one(folder: object) -> None:
    with pytest.raises(PlanError, match=r"flight_record=.*: give a folder, or None"):
        fxsched.backend(schedules.gpipe(2, 2), flight_record=folder)  # type: ignore[arg-type]
