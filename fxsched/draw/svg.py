"""A timeline as SVG: rows are workers, columns time, colours microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np

from .palette import Clock, hexadecimal, palette
from .svg_layout import (
    BOTTOM,
    CHARACTER,
    INK,
    LANE,
    LEFT,
    PAPER,
    RIGHT,
    TOP,
    Layout,
    around,
    document,
    group,
    heading_text,
    sheet,
    tag,
)
from .timeline_arrays import LETTERS, Array, Bars, Labels, cell_means

CELLS = 250_000  # that a large timeline is averaged over
LEVELS = 22  # of red, green and blue that means are rounded to
LEVEL = 12
DARK = (1, 3)  # B and U, whose labels are light


def render(bars: Bars, title: str, summary: str, clock: Clock) -> str:
    """The text of an SVG file.

    title, summary: what the first line says, in bold and not.
    """
    layout = Layout(bars)
    colours = palette(bars.microbatches, bars.meets)
    before, after = around(layout, colours, clock)
    title = title if len(title) <= 120 else title[:119] + "…"
    heading = LEFT + 8 * len(title) + 7 * len(summary)
    width = max(LEFT + layout.width + RIGHT, heading)
    height = TOP + layout.height + BOTTOM
    bold = tag("tspan", escape(title), font_weight="bold")
    parts = (
        "",
        tag("title", escape(f"{title} {summary}".strip())),
        sheet(width, height),
        heading_text(f"{bold} {escape(summary)}"),
        before,
        *(
            _bars(layout, colours, clock)
            if layout.detailed
            else _cells(layout, colours)
        ),
        after,
        "",
    )
    return document(parts, width, height)


def _bars(layout: Layout, colours: Array, clock: Clock) -> Iterator[str]:
    """A bar for each job, those of a colour together, then labels."""
    bars = layout.bars
    for b, d in np.unique(np.stack((bars.colour, bars.direction), 1), axis=0):
        jobs = np.flatnonzero((bars.colour == b) & (bars.direction == d))
        colour = hexadecimal(colours[b, d])
        yield group(
            "jobs", (_bar(layout, i, clock) for i in jobs.tolist()), fill=colour
        )
    names = Labels.of(bars, _room(layout)).texts if layout.size >= 7 else []
    for d in bars.directions if names else ():
        jobs = np.flatnonzero(bars.direction == d)
        yield group(
            "labels",
            (_label(layout, i, names[i]) for i in jobs.tolist() if names[i]),
            font_size=layout.size,
            fill=PAPER if d in DARK else INK,
            text_anchor="middle",
            pointer_events="none",
        )


def _place(layout: Layout, i: int) -> tuple[float, float]:
    """Where a job's bar begins, and how wide it is: never too narrow to be seen."""
    x = float(layout.x(layout.bars.start[i]))
    wide = float(layout.x(layout.bars.end[i])) - x
    return x, max(wide - 0.8 if wide > 3 else wide, 0.8)


def _bar(layout: Layout, i: int, clock: Clock) -> str:
    bars = layout.bars
    x, width = _place(layout, i)
    times = f"{clock.text(bars.start[i])} to {clock.text(bars.end[i])}"
    hint = tag("title", f"{bars.name(i)}, worker {bars.worker[i]}, {times}")
    y, height = layout.y(int(bars.worker[i])), layout.row - layout.gap
    return tag("rect", hint, x=x, y=y, width=width, height=height)


def _room(layout: Layout) -> Array:
    """How many characters there is room for on each job's bar."""
    bars = layout.bars
    widths = np.array([_place(layout, i)[1] for i in range(len(bars))])
    wide = 0.5 * (bars.direction == LETTERS.index("W"))  # the letter
    room: Array = (widths - 1) / (CHARACTER * layout.size) - wide
    return room


def _label(layout: Layout, i: int, text: str) -> str:
    x, width = _place(layout, i)
    middle = layout.y(int(layout.bars.worker[i])) + (layout.row - layout.gap) / 2
    return tag("text", text, x=x + width / 2, y=middle + 0.36 * layout.size)


def _cells(layout: Layout, colours: Array) -> Iterator[str]:
    """The mean colour of each pixel: a path for each colour, of horizontal lines."""
    columns = int(min(layout.width, CELLS // layout.rows))
    code = _codes(layout, colours, columns)
    edge = np.ones(code.shape, bool)
    edge[:, 1:] = code[:, 1:] != code[:, :-1]
    row, first = np.nonzero(edge)
    length = np.diff(np.flatnonzero(edge), append=code.size)
    runs = np.stack((code[row, first], first, row, length), 1)
    paths: dict[int, list[str]] = {}
    for colour, x, y, n in runs[runs[:, 0] >= 0].tolist():
        paths.setdefault(colour, []).append(f"M{x} {y}h{n}")
    lines = (
        tag("path", stroke=hexadecimal(_decoded(colour)), d="".join(paths[colour]))
        for colour in sorted(paths)
    )
    y = TOP + (layout.row - layout.gap) / 2
    yield group(
        "cells",
        lines,
        transform=f"translate({LEFT} {y:g}) "
        f"scale({layout.width / columns:g} {layout.row:g})",
        fill="none",
        stroke_width=1 - layout.gap / layout.row,
        shape_rendering="crispEdges",
    )


def _codes(layout: Layout, colours: Array, columns: int) -> Array:
    """The mean colours of (row, column) as numbers; -1 where all are idle."""
    bars = layout.bars
    rgb = colours[bars.colour, bars.direction]
    values = np.concatenate((rgb, np.ones((len(bars), 1))), 1)
    means = cell_means(bars, values, layout.rows, columns)
    idle = np.clip(1 - means[:, :, 3], 0, 1)
    lane = np.array([int(LANE[i : i + 2], 16) for i in (1, 3, 5)])
    mixed = np.rint((means[:, :, :3] + idle[:, :, None] * lane) / LEVEL)
    code = np.clip(mixed, 0, LEVELS - 1) @ np.array([LEVELS**2, LEVELS, 1])
    codes: Array = np.where(idle > 0.98, -1, code).astype(int)
    return codes


def _decoded(code: int) -> Array:
    levels = code // LEVELS**2, code // LEVELS % LEVELS, code % LEVELS
    return np.array([min(LEVEL * level, 255) for level in levels])
