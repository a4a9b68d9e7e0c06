"""Plans as text: what fits a screen, and what is left out of it."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest
import torch

import fxsched
from fxsched import Plan, PlanError, schedules
from fxsched.draw.cut_table import cut_table
from fxsched.draw.tables import cut_names, module_text, table, wrapped
from fxsched.ir import ops
from fxsched.ir.parts import WeightCut

from ..runtime.test_training_loop import Chain, batch


@functools.cache
def plan_of(workers: int) -> Plan:
    return fxsched.plan(Chain(16), schedules.one_f_one_b(workers, 16), *batch(16))


def test_what_is_left_of_an_indented_line_is_further_indented() -> None:
    assert wrapped(["one two", "  three four"], 9) == "one two\n  three\n    four"


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 16])
def test_a_plan_prints_as_a_summary_that_fits(workers: int) -> None:
    plan = plan_of(workers)
    text = str(plan)
    assert widest(text) <= 88 and len(text.splitlines()) < 45
    assert f"{workers} workers, 16 microbatches, {workers} stages" in text
    sends = [
        sum(node.target is ops.send for node in program.graph.nodes)
        for program in plan.programs
    ]
    assert f"; {sum(sends)} messages, " in text


@pytest.mark.parametrize("workers", [2, 16])
def test_what_explains_a_plan_fits(workers: int) -> None:
    assert widest(plan_of(workers).explain()) <= 100


def test_a_plan_is_one_line_in_a_debugger() -> None:
    text = repr(plan_of(2))
    assert text.startswith("<Plan 1f1b: 2 workers, 16 microbatches, 2 stages, 64 jobs")
    assert text.endswith(" sent>") and widest(text) <= 88 and "\n" not in text


@pytest.mark.slow
def test_a_summary_of_many_workers_shows_the_first() -> None:
    plan = fxsched.plan(Chain(16), schedules.ddp(32, 32), *batch(32))
    assert "\n15  " in str(plan) and str(plan).endswith("\nand 16 more")


def test_a_plan_without_b_prints() -> None:
    with torch.no_grad():
        plan = fxsched.plan(Chain(4), schedules.gpipe(2, 4), *batch(4))
    assert not plan.trains and "2 stages" in str(plan)


def test_a_table_has_so_many_jobs_in_so_wide_lines() -> None:
    plan = plan_of(2)
    text = plan.table(1, jobs=5, width=70)
    title, *lines, more = text.splitlines()
    assert title == "worker 1" and len(lines) == 7
    assert more == f"and {len(plan.table(1).splitlines()) - 8} more"
    assert widest(text) <= 70 < widest(plan.table(1, width=None))
    assert widest(plan.table(1)) <= 88


def test_a_table_says_how_many_bytes_are_sent() -> None:
    rows = plan_of(2).table(0).splitlines()
    assert any(" 0F0 " in row and " 32 B to 1 " in row for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 2}, r"rank=2\): give a worker, 0\.\.1"),
        ({"rank": -1}, r"rank=-1\): give a worker, 0\.\.1"),
        ({"rank": 0, "jobs": 0}, r"jobs=0\): give an int of 1 or more, or None"),
        ({"rank": 0, "width": 8.5}, r"width=8\.5\): give an int of 1 or more"),
    ],
)
def test_a_wrong_number_for_a_table_is_named(
    arguments: dict[str, int], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        plan_of(2).table(**arguments)


def test_the_longest_cells_of_a_table_are_cut() -> None:
    rows = [("a", "b" * 40, "c" * 12), ("a", "b", "c")]
    lines = table("one|two|three", rows, width=40).splitlines()
    assert lines[2].split() == ["a", "b" * 17 + "..", "c" * 12]
    assert table("one|two", []) == "one    two\n-----  -----"


def test_the_longest_cells_are_wrapped_between_words() -> None:
    rows = [("a", "layers.0.first_norm .. layers.12", "12.3 %"), ("b", "head", "1 %")]
    text = table("one|modules|share", rows, "llr", 25, wrap=True)
    assert text.splitlines() == [
        "one  modules        share",
        "---  ------------  ------",
        "a    layers.0.     12.3 %",
        "     first_norm",
        "     .. layers.12",
        "b    head             1 %",
    ]


def test_gaps_are_narrower_where_wrapped_cells_do_not_fit() -> None:
    rows = [("12", "layers.0.norm", "12.3 %")]
    assert table("one|modules|share", rows, "llr", 21, wrap=True).splitlines() == [
        "one modules    share",
        "--- --------- ------",
        "12  layers.0. 12.3 %",
        "    norm",
    ]
    assert widest(table("one|modules|share", rows, width=9, wrap=True)) == 20


def test_what_is_printed_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(2)
    for columns in (90, 80, 70):
        monkeypatch.setenv("COLUMNS", f"{columns}")
        assert widest(plan.explain()) <= columns and widest(str(plan)) <= columns
        assert widest(plan.simulate().table()) <= columns


def test_what_stages_send_on_one_worker_is_not_listed() -> None:
    schedule = replace(schedules.ddp(2, 4), stages=2)
    plan = fxsched.plan(Chain(4), schedule, *batch(4))
    assert len(plan.stages) == 2 and "sends" not in plan.explain().split("worker ")[0]
    assert re.search(r" held +sends\n.*\n0 .* 1: \d", plan_of(2).explain())


def test_a_path_is_not_cut_in_two() -> None:
    path = f"/home/user/{'long-name/' * 12}model.py:34:"
    assert wrapped([f"rows meet at {path} statistics"], 60).splitlines() == [
        "rows meet at",
        path,
        "statistics",
    ]


def test_weights_of_alike_ends_keep_what_differs() -> None:
    names = [f"{tower}.blocks.attention.projection.weight" for tower in ("one", "two")]
    cuts = [WeightCut(name, (4, 4), "rows", "", 2) for name in names]
    lines = next(cut_table(cuts)).splitlines()
    assert [line[:12] for line in lines[2:]] == ["one.blocks.a", "two.blocks.a"]


def test_a_star_stands_for_the_numbers_of_several_weights() -> None:
    names = ["head.0", "blocks.0.feed", "blocks.1.feed"]
    whys = [f"read by relu in {name}" for name in names]
    pairs = zip(names, whys, strict=True)
    cuts = [WeightCut(f"{name}.weight", (4, 4), "rows", why, 1) for name, why in pairs]
    first, second = next(cut_table(cuts)).splitlines()[2:]
    assert first.split()[:2] == ["head.0.weight", "1"] and first.endswith("in head.0")
    assert second.split()[:2] == ["blocks.*.feed.weight", "2"]
    assert second.endswith("in blocks.*.feed")


def test_cells_that_differ_at_their_ends_keep_the_ends() -> None:
    names = [f"model.layers.{layer}" for layer in (10, 11, 12)]
    lines = table("modules", [(name,) for name in names], width=12).splitlines()
    assert lines[2:] == ["..layers.10", "..layers.11", "..layers.12"]
    plain = table("modules", [("model.layers.1",), ("head",)], width=12).splitlines()
    assert [line.rstrip() for line in plain[2:]] == ["model.laye..", "head"]


@pytest.mark.parametrize(
    ("names", "limit", "cut"),
    [
        (
            [f"encoder.blocks.{i}.attention.weight" for i in (10, 11)],
            14,
            ["..0.attentio..", "..1.attentio.."],
        ),
        (
            [f"{e}.a.layers.{i}.x" for e in ("encoder", "decoder") for i in (1, 2)],
            12,
            ["encod..s.1.x", "encod..s.2.x", "decod..s.1.x", "decod..s.2.x"],
        ),
    ],
)
def test_names_are_cut_where_they_stay_different(
    names: list[str], limit: int, cut: list[str]
) -> None:
    assert cut_names(names, limit) == cut


def test_modules_of_a_stage_are_cut_to_the_first_and_the_last() -> None:
    layers = [f"image_encoder.layers.{i}" for i in range(4)]
    assert module_text(layers[:2]) == "image_encoder.layers.0, image_encoder.layers.1"
    assert module_text(layers) == "image_encoder.layers.0 .. layers.3"
    ends = ["image_encoder.embed", *layers, "image_encoder"]
    assert module_text(ends) == "image_encoder.embed .. image_encoder"
    assert module_text([*layers, "head"]) == "image_encoder.layers.0 .. head"
    names = [f"image_encoder.layers.1.{i}" for i in (2, 3)]
    assert cut_names(names, 18) == ["image_en..yers.1.2", "image_en..yers.1.3"]
