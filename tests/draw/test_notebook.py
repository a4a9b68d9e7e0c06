"""What notebooks show of plans, simulations and diagrams."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import pytest
import torch
from torch import nn

import fxsched
from fxsched import schedules
from fxsched.draw.palette import palette
from fxsched.draw.svg_layout import FAINT, INK, LANE, PAPER

SVG = "{http://www.w3.org/2000/svg}"


def simulated() -> Any:
    return fxsched.simulate(schedules.zb_h1(4, 8))


def planned() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    return fxsched.plan(model, schedules.gpipe(2, 2), torch.ones(4, 4))


SHOWN = {
    "plan": (planned, "gpipe: 2 workers", "stages and workers", "predicted step:"),
    "simulation": (simulated, "zb_h1: 4 workers", "what each worker", "bubble"),
    "diagram": (lambda: simulated().diagram(), "zb_h1: 4 wor", "characters", "F0"),
}


@pytest.mark.parametrize("kind", SHOWN)
def test_a_notebook_shows_the_picture_and_the_same_as_text(kind: str) -> None:
    make, label, title, text = SHOWN[kind]
    shown = make()
    page = shown._repr_html_()
    figure = ET.fromstring(page)
    assert figure.tag == "figure" and label in figure.attrib["aria-label"]
    (picture,) = figure.iter(f"{SVG}svg")
    jobs = shown.jobs if kind == "plan" else simulated().timeline
    bars = [g for g in picture.iter(f"{SVG}g") if g.get("class") == "jobs"]
    assert sum(len(group) for group in bars) == len(jobs)
    assert picture.attrib["role"] == "img" and picture.findtext(f"{SVG}title")
    summary, pre = figure.find("details/summary"), figure.find("details/pre")
    assert summary is not None and title in str(summary.text)
    assert pre is not None and text in str(pre.text)


@pytest.mark.parametrize("kind", SHOWN)
def test_it_is_small_and_needs_no_network_and_no_script(kind: str) -> None:
    page = SHOWN[kind][0]()._repr_html_()
    assert len(page) < 40_000
    for outside in ("<script", "<link", "href=", "src=", "url(", "@import"):
        assert outside not in page
    assert page.count("http") == page.count('xmlns="http://www.w3.org/2000/svg"')


def test_a_label_cannot_end_the_page() -> None:
    schedule = schedules.gpipe(1, 1)
    diagram = fxsched.simulate(schedule).diagram()
    other = fxsched.Diagram(diagram.bars, '"><script>alert(1)</script>')
    ET.fromstring(other._repr_html_())
    assert "<script" not in other._repr_html_()


def contrast(one: Any, other: Any) -> float:
    """WCAG 2.2's ratio of two colours of 0 to 255."""

    def luminance(rgb: Any) -> float:
        parts = [int(part) / 255 for part in rgb]
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def rgb(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


@pytest.mark.parametrize("microbatches", [1, 8, 24, 250])
def test_labels_have_the_contrast_that_WCAG_asks_for(microbatches: int) -> None:
    assert contrast(rgb(FAINT), rgb(PAPER)) >= 4.5
    assert contrast(rgb(FAINT), rgb(LANE)) >= 4.5
    for row in palette(microbatches, True):
        for colour, ink in zip(row, (INK, PAPER, INK, PAPER), strict=True):
            assert contrast(colour, rgb(ink)) >= 4.5, (colour, ink)
