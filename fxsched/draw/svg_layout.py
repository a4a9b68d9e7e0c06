"""What is around the jobs of an SVG picture: sizes, legend, lanes, numbers, axis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from html import escape

import numpy as np

from .palette import Clock, hexadecimal, ticks
from .timeline_arrays import LETTERS, NAMES, Array, Bars

JOBS = 4000  # at most so many get a bar of their own
ROWS = 512  # from there on workers share rows
WIDTH = (620, 1480)  # of the plot, in pixels
HEIGHT = 900
LEFT, RIGHT, TOP, BOTTOM = 58, 18, 66, 40
CHARACTER = 0.58  # its width, in font sizes
INK, FAINT, LANE, PAPER = "#1f2328", "#59636e", "#f1f3f5", "#ffffff"
DARK_STYLE = (  # over the attributes, by class, where readers prefer it
    "@media (prefers-color-scheme: dark) { .ink { fill: #e6edf3 } "
    ".legend, .workers, .axis { fill: #9198a1 } .lanes { fill: #21262d } "
    ".paper { fill: #0d1117 } }"
)


@dataclass(frozen=True, eq=False)
class Layout:
    """Where things are, in pixels."""

    bars: Bars

    @cached_property
    def short(self) -> float:
        """How long a short job takes; few are shorter."""
        times = self.bars.end - self.bars.start
        times = times[times > 0]
        return float(np.quantile(times, 0.1)) if len(times) else self.bars.span

    @cached_property
    def width(self) -> float:
        """Of the plot: wide enough for most labels, if that is not too wide."""
        wanted = 30 * self.bars.span / self.short if self.short else 0.0
        return min(max(round(wanted), WIDTH[0]), WIDTH[1])

    @property
    def rows(self) -> int:
        """How many workers are drawn."""
        return min(self.bars.workers, ROWS)

    @property
    def row(self) -> float:
        """The height of a row, with the gap under it."""
        return max(2, min(26, HEIGHT // self.rows))

    @property
    def gap(self) -> float:
        """The space between two rows."""
        return 2 if self.row > 12 else 1 if self.row > 4 else 0

    @property
    def height(self) -> float:
        """The height of all rows."""
        return self.row * self.rows

    @cached_property
    def size(self) -> float:
        """The font size of labels: smaller where only that fits short jobs."""
        narrow = self.x(self.short) - LEFT < 20
        return min(9.0 if narrow else 11.0, 0.72 * self.row)

    @property
    def detailed(self) -> bool:
        """Whether jobs get bars of their own; else pixels are means of jobs."""
        return len(self.bars) <= JOBS and self.rows == self.bars.workers

    def x(self, time: float) -> float:
        """Where a time is, from the left."""
        return LEFT + self.width * time / (self.bars.span or 1.0)

    def y(self, row: float) -> float:
        """Where a row is, from the top."""
        return TOP + self.row * row


def tag(name: str, content: str = "", **attributes: object) -> str:
    """An element, closed: content is SVG already. font_size stands for font-size."""
    written = "".join(
        f' {key.replace("_", "-")}="{_text(value)}"'
        for key, value in attributes.items()
    )
    return f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>"


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return escape(str(value))


def group(name: str, parts: Iterator[str], **attributes: object) -> str:
    """Elements with attributes in common, a line each."""
    lines = "\n".join(("", *parts, ""))
    return tag("g", lines, **{"class": name}, **attributes)


def document(parts: Iterable[str], width: float, height: float) -> str:
    """A picture of its parts, as a file."""
    picture = tag(
        "svg",
        "\n".join((tag("style", DARK_STYLE), *parts)),
        xmlns="http://www.w3.org/2000/svg",
        width=width,
        height=height,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        font_family="Helvetica, Arial, sans-serif",
    )
    return picture + "\n"


def sheet(width: float, height: float) -> str:
    """What a picture is drawn on."""
    name = {"class": "paper"}
    return tag("rect", width=width, height=height, rx=6, fill=PAPER, **name)


def heading_text(content: str) -> str:
    """A picture's first line."""
    return tag(
        "text", content, x=LEFT, y=24, font_size=14, fill=INK, **{"class": "ink"}
    )


def around(layout: Layout, colours: Array, clock: Clock) -> tuple[str, str]:
    """What is drawn before the jobs, and after them."""
    faint = {"font_size": 11, "fill": FAINT}
    before = (
        group("legend", _legend(layout, colours), **faint),
        group("lanes", _lanes(layout), fill=LANE),
        group("workers", _numbers(layout), text_anchor="end", **faint),
    )
    after = group("axis", _axis(layout, clock), text_anchor="middle", **faint)
    return "\n".join(before), after


def _legend(layout: Layout, colours: Array) -> Iterator[str]:
    """Directions, then microbatches: a box for each, or a band from first to last."""
    x, count = float(LEFT), layout.bars.microbatches
    named = [
        (f"{LETTERS[d]} {NAMES[d]}", colours[layout.bars.sample, d])
        for d in layout.bars.directions
    ]
    if layout.bars.meets:
        named.append(("all rows (*)", colours[count, 1]))
    for name, colour in named:
        fill = hexadecimal(colour)
        yield tag("rect", x=x, y=37, width=16, height=12, rx=2, fill=fill)
        yield tag("text", name, x=x + 21, y=47)
        x += 38 + 11 * CHARACTER * len(name)
    if not count or layout.bars.sample:  # no job of one microbatch
        return
    yield tag("text", "microbatch", x=x, y=47)
    x += 74
    if count <= 12:
        for b in range(count):
            at, colour = x + 18 * b, hexadecimal(colours[b, 1])
            yield tag("rect", x=at, y=37, width=18, height=12, fill=colour)
            yield tag("text", str(b), x=at + 9, y=47, fill=PAPER, text_anchor="middle")
        return
    yield tag("text", "0", x=x, y=47)
    shown = np.linspace(0, count - 1, 24).astype(int)
    for i, b in enumerate(shown // 2 * 2):  # odd ones may be darker
        colour = hexadecimal(colours[b, 1])
        yield tag("rect", x=x + 11 + 6 * i, y=37, width=6, height=12, fill=colour)
    yield tag("text", str(count - 1), x=x + 16 + 6 * len(shown), y=47)


def _lanes(layout: Layout) -> Iterator[str]:
    """What is seen where workers are idle."""
    if not layout.gap:
        yield tag("rect", x=LEFT, y=TOP, width=layout.width, height=layout.height)
        return
    for row in range(layout.rows):
        high = layout.row - layout.gap
        yield tag("rect", x=LEFT, y=layout.y(row), width=layout.width, height=high)


def _numbers(layout: Layout) -> Iterator[str]:
    """Of all workers, or every 2nd, 5th, 10th and so on where rows are thin."""
    each = layout.height / layout.bars.workers
    steps = (k * 10**power for power in range(9) for k in (1, 2, 5))
    every = next(step for step in steps if step * each >= 12)
    yield tag("text", "worker", x=LEFT - 8, y=TOP - 6)
    for worker in range(0, layout.bars.workers, every):
        row = worker * layout.rows / layout.bars.workers
        y = layout.y(row) + (max(layout.row, 4) - layout.gap) / 2 + 4
        yield tag("text", str(worker), x=LEFT - 8, y=y)


def _axis(layout: Layout, clock: Clock) -> Iterator[str]:
    y = TOP + layout.height
    yield tag("rect", x=LEFT, y=y, width=layout.width, height=1)
    for time in ticks(layout.bars.span * clock.factor, layout.width / 70):
        x = layout.x(time / clock.factor)
        yield tag("rect", x=x, y=y, width=1, height=5)
        yield tag("text", f"{time:.6g}", x=x, y=y + 18)
    name = f"time, {clock.unit}" if clock.unit else "time"
    yield tag("text", name, x=LEFT + layout.width / 2, y=y + 33)
