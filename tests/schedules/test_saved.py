"""Schedules in files, and schedules by name."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fxsched
from fxsched import PlanError, Schedule, load_schedule, schedules, search, simulate
from fxsched.cli import main as cli
from fxsched.schedules import LIBRARY

from ..runtime.test_training_loop import Chain, assert_like, batch, compiled, eager

SEARCHED = {"F": 2.0, "B": 3.0, "W": 1.0}


def saved(schedule: Schedule, folder: Path) -> Schedule:
    schedule.save(folder / "saved.json")
    return load_schedule(folder / "saved.json")


def found(**options: Any) -> Schedule:
    return search(SEARCHED, 2, 4, 2, quiet=True, effort=0.02, **options)


@pytest.mark.parametrize(
    "schedule",
    [
        found(stages=4),
        schedules.zb_h1(2, 4),
        schedules.fslpp(4, 2, 8),
        replace(schedules.fsdp(2, 4), stages=3),
        replace(schedules.gpipe(2, 4), in_flight=lambda s: 2 if s else None),
    ],
    ids=str,
)
def test_a_loaded_schedule_places_and_orders_the_same_jobs(
    schedule: Schedule, tmp_path: Path
) -> None:
    loaded = saved(schedule, tmp_path)
    assert str(loaded) == str(schedule) and loaded.stages == schedule.stages
    runs = [simulate(each, None, SEARCHED).timeline for each in (schedule, loaded)]
    assert list(runs[0]) == list(runs[1])
    assert runs[0].jobs.keeper == runs[1].jobs.keeper


@pytest.mark.slow
def test_a_loaded_schedule_trains_as_eager(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, reference, inputs = Chain(4), Chain(4), batch(8)
    reference.load_state_dict(model.state_dict())
    compiled(model, saved(found(), tmp_path))(*inputs).backward()
    eager(reference, *inputs, parts=4)
    assert_like(model, reference)


def test_the_schedule_of_a_plan_can_be_saved(tmp_path: Path) -> None:
    plan = fxsched.plan(Chain(4), schedules.graph(2, 4), *batch(8))
    loaded = saved(plan.schedule, tmp_path)
    assert {job: loaded.place(job) for job in plan.jobs} == plan.placements


def test_shards_cannot_be_saved(tmp_path: Path) -> None:
    schedule = schedules.sharded(schedules.gpipe(2, 2), 2)
    with pytest.raises(PlanError, match=r"has 2 shards, which a file can't hold; sav"):
        schedule.save(tmp_path / "shards.json")


def test_open_stages_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"save: ddp: .* leaves its stages to the plan"):
        schedules.ddp(2).save(tmp_path / "ddp.json")
    with pytest.raises(PlanError, match=r"none/x.json can't be written: No such file"):
        schedules.gpipe(2, 2).save(tmp_path / "none/x.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fxsched_schedule": 2}, r"of version 2, and this fxsched reads 1"),
        ({"fxsched_schedule": None}, r"has no 'fxsched_schedule'; give what"),
        ({"workers": None}, r"it lacks 'workers'; its fields are fxsched_schedule, "),
        ({"spam": 3}, r"it has 'spam'; its fields are"),
        ({"workers": 0}, r"workers=0\): give an int of 1 or more"),
        ({"workers": 1}, r"puts its weights on worker 1, but workers are 0\.\.0"),
        ({"microbatches": 3}, r"its jobs aren't those of .* its stages: 0B2"),
        ({"stages": "two"}, r"stages='two'\): give an int"),
        ({"split_backward": 1}, r"split_backward=1\): give True or False"),
        ({"in_flight": 3}, r"its in_flight must be a list of ints"),
        ({"in_flight": [0, 1]}, r"its in_flight must be a list of ints"),
        ({"jobs": []}, r"its jobs must be an object, with 2F0"),
        ({"jobs": {"0F0": [0, 0]}}, r"job 0F0 has \[0, 0\]; give three ints"),
        ({"jobs": {"F0": [0, 0, 0]}}, r"'F0' is not a job: write stage"),
    ],
)
def test_a_wrong_file_is_said_to_be_so(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "saved.json"
    schedules.gpipe(2, 2).save(path)
    record = json.loads(path.read_text()) | change
    record = {field: value for field, value in record.items() if value is not None}
    path.write_text(json.dumps(record))
    with pytest.raises(PlanError, match=rf"saved.json holds no schedule: .*{message}"):
        load_schedule(path)


def test_what_is_no_json_is_said_to_be_so(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text in (b"spam", b"\xff\xfe\x00"):
        path.write_bytes(text)
        with pytest.raises(PlanError, match=r"x.json is not JSON \(.*give what Sched"):
            load_schedule(path)
    path.write_text("[1]")
    with pytest.raises(PlanError, match=r"x.json holds no schedule: it has no 'fxsch"):
        load_schedule(path)
    with pytest.raises(PlanError, match=r"y.json can't be read: No such file"):
        load_schedule(tmp_path / "y.json")


def test_commands_save_and_take_schedules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "best.json"
    options = "--workers 2 --microbatches 4 --backward 1 --weight 1"
    cli.main(f"search {options} --effort 0.02 --no-text --save {path}".split())
    text = capsys.readouterr().out
    assert f"wrote {path}\n" in text
    cli.main(f"simulate --schedule {path} --no-text --backward 1 --weight 1".split())
    assert capsys.readouterr().out == text[-len(text.split(f"{path}\n\n")[1]) :]
    with pytest.raises(SystemExit):
        cli.main(f"simulate --schedule {path} --workers 2".split())
    assert (
        "is from a file, which says all but --shards; leave out --workers"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["1f1b", "one_f_one_b"])
def test_one_f_one_b_has_two_names(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert LIBRARY[name] is schedules.one_f_one_b and name in LIBRARY
    assert [key for key in LIBRARY if LIBRARY[key] is LIBRARY[name]] == ["1f1b"]
    cli.main(f"simulate --no-text --schedule {name} --workers 2".split())
    assert capsys.readouterr().out.startswith("1f1b: 2 workers")
    cli.main(f"compare --schedules {name},1f1b,gpipe --workers 2".split())
    assert len(re.findall(r"^1f1b ", capsys.readouterr().out, re.M)) == 1


@pytest.mark.parametrize(
    ("text", "near"),
    [("one_f_one", "one_f_one_b"), ("1F1B", "1f1b"), ("gpip", "gpipe")],
)
def test_the_nearest_name_is_told(text: str, near: str) -> None:
    with pytest.raises(PlanError, match=rf"{text}' .*; did you mean {near}\?"):
        LIBRARY.name(text)
