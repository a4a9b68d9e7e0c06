"""Pictures of timelines show every job where it ran, at any size."""

from __future__ import annotations

import json
import re
import time
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest

from fxsched import Direction, Job, Link, PlanError, Schedule, schedules, simulate
from fxsched.clock.timeline import Event
from fxsched.draw.diagram import Diagram, draw
from fxsched.draw.palette import clock, palette, ticks
from fxsched.draw.svg_layout import LEFT, WIDTH
from fxsched.draw.timeline_arrays import bars_of, cell_means, held

GOLDEN = Path(__file__).parents[1] / "golden" / "zb_h1.svg"
FORWARD, BACKWARD, WEIGHT, _ = Direction


def split(workers: int, microbatches: int) -> Schedule:
    """A pipeline with B and W apart."""
    return Schedule(
        workers,
        microbatches,
        workers,
        w=lambda s, b, d: (s, s),
        n=lambda s, b, d: b,
        split_backward=True,
    )


def event(job: str, worker: int, start: float, end: float) -> Event:
    return Event(Job.parse(job), worker, start, end)


def elements(diagram: Diagram, kind: str, name: str) -> list[ET.Element]:
    """The elements of a kind in an SVG's groups of a class."""
    svg = "{http://www.w3.org/2000/svg}"
    root = ET.fromstring(diagram.svg())
    groups = [g for g in root.iter(f"{svg}g") if g.get("class") == name]
    return [found for g in groups for found in g.iter(f"{svg}{kind}")]


def bars(diagram: Diagram) -> dict[str, ET.Element]:
    """The SVG's bars by what hovering over them says first: the job."""
    found = {}
    for rect in elements(diagram, "rect", "jobs"):
        assert rect[0].text is not None
        found[rect[0].text.split(",")[0]] = rect
    return found


def texts(diagram: Diagram, name: str) -> list[str]:
    return [text.text or "" for text in elements(diagram, "text", name)]


def page_data(diagram: Diagram) -> dict[str, Any]:
    match = re.search(
        r'<script id="data" type="application/json">(.*?)</script>', diagram.html()
    )
    assert match
    found: dict[str, Any] = json.loads(match[1])
    return found


def test_the_golden_picture(request: pytest.FixtureRequest) -> None:
    svg = simulate(schedules.zb_h1(4, 8)).diagram().svg()
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(svg, encoding="utf-8")
    assert svg == GOLDEN.read_text(encoding="utf-8"), "see --update-golden"


@pytest.mark.parametrize(
    "schedule",
    [schedules.gpipe(2, 4), schedules.lpp(8, 2, 32), split(4, 8)],
    ids=["gpipe", "lpp", "split"],
)
def test_each_job_is_a_bar_at_its_time_and_worker(schedule: Schedule) -> None:
    simulation = simulate(schedule)
    found = bars(simulation.diagram())
    assert len(found) == len(simulation.timeline)
    ys = sorted({float(rect.get("y", 0)) for rect in found.values()})
    lanes = elements(simulation.diagram(), "rect", "lanes")
    pixels = float(lanes[0].get("width", 0)) / simulation.latency
    for job, worker, start, end in simulation.timeline:
        rect = found[str(job)]
        assert float(rect.get("x", 0)) == pytest.approx(LEFT + start * pixels, abs=0.01)
        width = float(rect.get("width", 0))
        assert width == pytest.approx((end - start) * pixels, abs=0.81)
        assert float(rect.get("y", 0)) == ys[worker]


def test_bars_are_coloured_by_microbatch_and_direction() -> None:
    diagram = simulate(split(2, 4)).diagram()
    svg = "{http://www.w3.org/2000/svg}"
    colours = {
        (g.get("fill"), re.sub(r"^\d+", "", (rect[0].text or "").split(",")[0]))
        for g in ET.fromstring(diagram.svg()).iter(f"{svg}g")
        if g.get("class") == "jobs"
        for rect in g
    }
    assert len(colours) == len({fill for fill, _ in colours}) == 12


def test_directions_differ_in_grey() -> None:
    grey = palette(40) @ np.array([0.2126, 0.7152, 0.0722])
    forward, backward, weight, update = grey.min(0)
    assert forward > weight + 25 > grey[:, 2].min() > backward + 25 > update + 50
    assert grey[:, 0].min() > grey[:, 2].max() > grey[:, 1].max()
    assert backward > grey[:, 3].max()


def test_updates_have_a_colour_and_a_letter_where_there_are_any() -> None:
    plain = schedules.one_f_one_b(4, 8)
    times = {"F": 1, "B": 2, "U": 1}
    updated = simulate(replace(plain, update_every=4), durations=times).diagram()
    assert {"0U3", "3U7"} <= set(bars(updated)) and "3U7" in texts(updated, "labels")
    assert "U update" in texts(updated, "legend")
    assert "B3- U3" in updated.text(100)
    assert {len(row) for row in page_data(updated)["palette"]} == {4}
    without = simulate(plain).diagram()
    assert "U update" not in texts(without, "legend")
    assert {len(row) for row in page_data(without)["palette"]} == {3}


def test_the_legend_has_no_microbatches_where_all_jobs_are_of_all_rows() -> None:
    joint = simulate(schedules.gpipe(1, 4), joint=[0]).diagram()
    assert texts(joint, "legend") == ["F forward", "B backward", "all rows (*)"]
    data = page_data(joint)
    assert data["sample"] == data["joint"] == 1
    mixed = simulate(schedules.gpipe(2, 2), joint=[1]).diagram()
    assert texts(mixed, "legend")[3:] == ["microbatch", "0", "1"]
    assert page_data(mixed)["sample"] == 0


def test_labels_name_the_job_where_there_is_room() -> None:
    assert sorted(texts(simulate(schedules.gpipe(2, 3)).diagram(), "labels")) == sorted(
        f"{s}{d}{b}" for s in range(2) for d in "FB" for b in range(3)
    )
    wide = texts(simulate(schedules.one_f_one_b(8, 32)).diagram(), "labels")
    assert {"F0", "B31"} <= set(wide) and "7B31" not in wide
    assert not texts(simulate(schedules.gpipe(4, 200)).diagram(), "labels")


def test_the_title_has_step_and_bubble_and_is_escaped() -> None:
    diagram = draw([event("0F0", 0, 0, 3)], 2, "a <b> & c")
    title = ET.fromstring(diagram.svg()).findtext("{http://www.w3.org/2000/svg}title")
    assert title == "a <b> & c step 3, bubble 50.0 %"
    assert "<title>a &lt;b&gt; &amp; c</title>" in diagram.html()
    assert diagram.text(80).startswith("a <b> & c: step 3, bubble 50.0 %\n")


def test_a_title_cannot_end_the_page_s_data() -> None:
    title = "</script><script>alert(1)</script> @data@"
    diagram = draw([event("0F0", 0, 0, 1)], 1, title)
    assert page_data(diagram)["title"] == title


def test_a_page_has_every_job() -> None:
    simulation = simulate(split(4, 8), durations=lambda job: 0.1 + job.stage / 7)
    data = page_data(simulation.diagram())
    rows = zip(
        data["stage"],
        data["direction"],
        data["microbatch"],
        data["worker"],
        data["start"],
        data["end"],
        strict=True,
    )
    found = {
        Job.parse(f"{s}{d}{b}"): (worker, start, end)
        for s, d, b, worker, start, end in rows
    }
    assert len(found) == len(simulation.timeline)
    for job, *rest in simulation.timeline:
        assert found[job] == pytest.approx(tuple(rest), rel=1e-9)


def test_a_page_needs_no_network() -> None:
    html = simulate(schedules.gpipe(2, 2)).diagram().html()
    assert not re.search(r"https?:|//[a-z]+\.|src=|href=|@import", html)


@pytest.mark.parametrize(
    "schedule",
    [
        schedules.one_f_one_b(4, 8),
        schedules.gpipe(4, 8),
        schedules.lpp(4, 2, 8, stages=6),
        split(4, 8),
        Schedule(3, 6, 4, w=lambda s, b, d: (s % 3, (s + 2 * (d is BACKWARD)) % 3)),
    ],
    ids=["1f1b", "gpipe", "lpp", "split", "elsewhere"],
)
def test_memory_peaks_where_the_simulation_says(schedule: Schedule) -> None:
    simulation = simulate(schedule)
    held = page_data(simulation.diagram())["held"]
    peaks = [max(one["counts"], default=0) for one in held]
    assert peaks == [worker.peak_activations for worker in simulation.workers]
    assert all(one["counts"][-1:] in ([], [0]) for one in held)


def test_memory_is_held_from_f_to_release() -> None:
    events = [
        event("0F0", 0, 1, 2),
        event("0F1", 0, 2, 3),
        event("0B0", 0, 3, 4),
        event("0W0", 0, 6, 7),
        event("0B1", 0, 4, 5),
        event("0W1", 0, 5, 6),
    ]
    for release, expected in (
        (BACKWARD, [(0, 1), (1, 2), (3, 1), (4, 0)]),
        (WEIGHT, [(0, 1), (1, 2), (5, 1), (6, 0)]),
    ):
        [found] = held(bars_of(events, 1), release)
        assert list(zip(*found, strict=True)) == expected


def test_text_has_a_row_for_each_worker() -> None:
    text = simulate(schedules.one_f_one_b(2, 4)).diagram().text(70)
    assert text.splitlines() == [
        "1f1b: 2 workers, 4 microbatches: step 15, bubble 20.0 %",
        "worker",
        "     0  0F0 0F1 ........0B0---- 0F2 0B1---- 0F3 0B2---- ....0B3----",
        "     1  ....1F0 1B0---- 1F1 1B1---- 1F2 1B2---- 1F3 1B3---- ........",
        "  time  0       2       4       6       8       10      12      14",
        "",
        "0F0 forward of stage 0, microbatch 0, B backward; dots: idle",
    ]


def test_narrow_text_says_what_a_wider_one_shows() -> None:
    """Microbatches first, then stages."""
    diagram = simulate(schedules.one_f_one_b(2, 4)).diagram()
    narrow = diagram.text(24).splitlines()
    assert narrow[2:4] == [
        "     0  FF..B0FB1FB2.B3",
        "     1  .FB0FB1FB2FB3..",
    ]
    assert narrow[-2:] == ["To see microbatches, use", "text(38)."]
    middle = diagram.text(38).splitlines()
    assert middle[2] == "     0  F0F1....B0- F2B1- F3B2- ..B3-"
    assert middle[6:] == [
        "F0 forward of microbatch 0, B",
        "backward; dots: idle",
        "To see stages, use text(68).",
    ]
    assert "stages" not in diagram.text(68).splitlines()[-1]


@pytest.mark.parametrize("width", [56, 80, 128, 140, 220])
def test_the_legend_explains_a_job_as_the_rows_show_it(width: int) -> None:
    text = simulate(schedules.one_f_one_b(2, 13)).diagram().text(width)
    rows, legend = text.split("  time")
    (shown,) = re.findall(r"(\w+) \w+ of", legend)
    assert f" {shown}" in rows or f".{shown}" in rows


def test_names_of_jobs_are_whole_or_left_out() -> None:
    text = simulate(schedules.one_f_one_b(2, 13)).diagram().text(140)
    for row in text.splitlines()[2:4]:
        forwards = re.findall(r"F(\d+)", row)
        assert forwards == [str(b) for b in range(13)]


def test_characters_of_many_jobs_are_those_of_most() -> None:
    lines = simulate(schedules.gpipe(2, 300)).diagram().text(68).splitlines()
    letters = Counter(lines[2][8:])
    assert letters["F"] == 20 and letters["B"] == 40
    assert lines[-1] == "To see each job, save it as .svg or .html."
    each = simulate(schedules.gpipe(2, 300)).diagram().text(911).splitlines()
    assert Counter(each[2][8:])["F"] == 300 and "each job" not in each[-1]


@pytest.mark.parametrize("width", [10, 40, 100, 300])
def test_text_fits_its_width(width: int) -> None:
    for schedule in (schedules.gpipe(4, 4), schedules.ddp(300)):
        text = simulate(schedule, stages=4).diagram().text(width)
        rows = text.splitlines()[1:]
        assert max(map(len, rows)) <= max(width, 20 + 12)
        assert rows.index("") <= 66


def test_colour_is_only_for_those_who_ask() -> None:
    diagram = simulate(schedules.gpipe(2, 2)).diagram()
    assert "\x1b" not in diagram.text(80)
    coloured = diagram.text(80, color=True)
    assert "\x1b[48;2;" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == diagram.text(80)


def test_str_is_the_text_at_the_terminal_s_width(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "61")
    diagram = simulate(schedules.gpipe(2, 4)).diagram()
    hint = " ".join(str(diagram).split())
    assert str(diagram).splitlines()[:4] == diagram.text(61).splitlines()[:4]
    [columns] = re.findall(r"To see .*, widen the terminal or set COLUMNS=(\d+)", hint)
    monkeypatch.setenv("COLUMNS", columns)
    assert "To see" not in str(diagram)


def test_save_takes_the_format_from_the_name(tmp_path: Path) -> None:
    diagram = simulate(schedules.gpipe(2, 2)).diagram()
    for name, text in (
        ("a.svg", diagram.svg()),
        ("a.HTML", diagram.html()),
        ("a.txt", diagram.text(100) + "\n"),
    ):
        diagram.save(tmp_path / name)
        assert (tmp_path / name).read_text(encoding="utf-8") == text
    assert diagram._repr_svg_() == diagram.svg()
    with pytest.raises(PlanError, match=r"a\.png.*ends with \.svg, \.html, \.txt"):
        diagram.save(tmp_path / "a.png")


@pytest.mark.slow
def test_large_pictures_are_quick_and_small() -> None:
    simulation = simulate(schedules.one_f_one_b(64, 1000))
    began = time.perf_counter()
    diagram = simulation.diagram()
    svg, html, text = diagram.svg(), diagram.html(), diagram.text(120)
    assert time.perf_counter() - began < 8  # 1.5 on one idle core
    assert len(svg) < 2e6 and len(html) < 5e6 and len(text) < 2e4
    assert ET.fromstring(svg) is not None


def test_many_workers_share_rows() -> None:
    diagram = simulate(schedules.ddp(4096), stages=2).diagram()
    root = ET.fromstring(diagram.svg())
    assert float(root.get("height", 0)) < 1200
    assert len(texts(diagram, "workers")) < 100
    assert diagram.text(100).splitlines().index("") == 67
    assert len(page_data(diagram)["held"]) == 4096


def test_a_large_picture_s_pixels_are_as_dark_as_its_jobs() -> None:
    diagram = simulate(schedules.gpipe(4, 1500)).diagram()
    assert not bars(diagram)
    paths = elements(diagram, "path", "cells")
    drawn = sum(int(n) for p in paths for n in re.findall(r"h(\d+)", p.get("d", "")))
    busy = 1 - diagram.bars.bubble
    assert drawn / (4 * WIDTH[1]) == pytest.approx(busy, abs=0.01)


def test_averages_keep_the_sum() -> None:
    random = np.random.default_rng(0)
    start = random.uniform(0, 90, 50)
    events = [
        Event(Job(0, i, FORWARD), i % 7, s, s + random.uniform(0, 9))
        for i, s in enumerate(start)
    ]
    found = bars_of(events, 7, step=(0.0, 100.0))
    for rows, columns in ((7, 33), (3, 1000), (1, 1)):
        means = cell_means(found, np.ones((50, 1)), rows, columns)
        sharing = np.bincount(np.arange(7) * rows // 7)
        total = (means[:, :, 0].sum(1) * sharing).sum() * 100 / columns
        assert total == pytest.approx(sum(e.end - e.start for e in events))


def test_nothing_to_draw() -> None:
    diagram = draw([], 3, "nothing")
    assert diagram.text(60).splitlines()[0] == "nothing: no jobs"
    assert len(diagram.text(60).splitlines()) == 6  # and nothing to explain
    assert not bars(diagram)
    assert page_data(diagram)["stage"] == []


@pytest.mark.parametrize("length", [1e-9, 1e-6, 1e-3, 1.0, 1e3])
def test_seconds_of_any_size(length: float) -> None:
    events = [
        event("0F0", 0, 5e4, 5e4 + length),
        event("0F1", 0, 5e4 + length, 5e4 + length),  # takes no time
        event("0B0", 2, 5e4 + 2 * length, 5e4 + 4 * length),
    ]
    diagram = draw(events, 4, unit="s")
    found = bars(diagram)
    assert float(found["0F1"].get("width", 0)) > 0.5
    unit = texts(diagram, "axis")[-1]
    assert unit in ("time, s", "time, ms", "time, µs", "time, ns")
    assert texts(diagram, "axis")[0] == "0"
    assert len(page_data(diagram)["held"]) == 4
    assert diagram.text(80)


def test_times_in_a_column_have_as_many_digits() -> None:
    ms = clock(3.41e-3, "s")
    times = (3.41e-3, 8.8e-3, 10.914e-3, 1.5)
    assert [ms.cell(time) for time in times] == ["3.410", "8.800", "10.91", "1500"]
    assert [clock(27.0, "").cell(time) for time in (27.0, 25.5)] == ["27", "25.5"]


def test_clocks_suit_the_step() -> None:
    shown = [clock(t, "s").text(t) for t in (2e-9, 3.5e-6, 1e-3, 0.02, 1.0, 4e4)]
    assert shown == ["2 ns", "3.5 µs", "1 ms", "20 ms", "1 s", "4e+04 s"]
    assert clock(0.02, "").text(0.02) == "0.02"


def test_ticks_are_round_and_few() -> None:
    assert ticks(33, 10) == [0, 5, 10, 15, 20, 25, 30]
    assert ticks(0.9, 3) == pytest.approx([0, 0.5])
    for span in (1e-9, 0.7, 1, 3.3, 1e6):
        assert 4 <= len(ticks(span, 10)) <= 11


def test_the_step_may_be_longer_than_its_jobs() -> None:
    diagram = draw([event("0F0", 0, 2, 3)], 1, step=(0, 4))
    assert diagram.bars.span == 4 and diagram.bars.start[0] == 2
    assert diagram.bars.bubble == 0.75


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (event("2F0", 4, 0, 1), r"2F0 ran on worker 4, but workers are 0\.\.1"),
        (event("2F0", 0, 2, 1), r"2F0 runs from 2 to 1; give an end that is not"),
        (event("2F0", 0, 0, float("nan")), r"2F0 runs from 0 to nan"),
    ],
)
def test_events_that_make_no_sense(bad: Event, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        draw([event("0F0", 0, 0, 1), bad], 2)
    with pytest.raises(PlanError, match="0 workers: give 1 or more"):
        draw([], 0)


def test_a_simulation_s_diagram_says_what_its_table_says() -> None:
    simulation = simulate(schedules.fsdp(4), transfer=0.5, prefetch=1)
    diagram = simulation.diagram()
    assert diagram.bars.span == simulation.latency
    assert diagram.bars.bubble == pytest.approx(simulation.bubble_rate)
    assert diagram.release is simulation.schedule.release


def test_a_page_shows_links_whose_messages_take_no_time_to_speak_of() -> None:
    stages = nx.path_graph(2, nx.DiGraph)
    stages.edges[0, 1]["bytes"] = 8.0
    found = simulate(schedules.gpipe(2, 2), stages, {"F": 1, "B": 1}, Link(1e30))
    page = found.diagram().html()
    assert "<title>worker 0 to worker 1: 16 B, busy 0.0 % of the step</title>" in page


def test_a_legend_says_that_jobs_are_too_short_to_draw() -> None:
    times = {(s, d): t for s, t in enumerate((1.0, 1e-4)) for d in "FB"}
    pipeline = schedules.gpipe(2, 2)
    short = simulate(
        pipeline, durations=lambda job: times[job.stage, str(job.direction)]
    )
    assert "dots: idle, or a job too short to draw" in short.diagram().text(100)
    assert "dots: idle\n" in f"{simulate(pipeline).diagram().text(80)}\n"
