"""Curves over one axis as SVG, with a line at the value that must not be passed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from .palette import hexadecimal, palette, ticks
from .svg_layout import (
    FAINT,
    LANE,
    LEFT,
    RIGHT,
    TOP,
    document,
    group,
    heading_text,
    sheet,
    tag,
)

WIDTH, HEIGHT, BOTTOM = 620.0, 320.0, 44.0
LIMIT = "#d1242f"
Curve = Sequence[tuple[float, float]]


def curves(
    named: Mapping[str, Curve],
    title: str,
    axes: tuple[str, str],
    limit: float,
    top: float,
) -> str:
    """The text of an SVG file.

    named: (x, y) of each curve, x from 0 on. axes: what x and y are.
    limit: the y that is marked. top: the largest y that is drawn.
    """
    span = max(x for curve in named.values() for x, _ in curve) or 1.0
    colours = [hexadecimal(pair[1]) for pair in palette(len(named))]
    width, height = LEFT + WIDTH + RIGHT, TOP + HEIGHT + BOTTOM
    y = _y(limit, top)
    ground = tag("rect", x=LEFT, y=TOP, width=WIDTH, height=HEIGHT)
    parts = (
        "",
        tag("title", escape(title)),
        sheet(width, height),
        heading_text(escape(title)),
        group("lanes", iter([ground]), fill=LANE),
        group("axis", _axes(span, top, axes), font_size=11, fill=FAINT),
        tag("path", d=f"M{LEFT} {y:.2f}h{WIDTH:g}", stroke=LIMIT, stroke_dasharray=5),
        group(
            "curves",
            (
                _path(curve, span, top, colour)
                for curve, colour in zip(named.values(), colours, strict=True)
            ),
            fill="none",
            stroke_width=2,
        ),
        group("legend", _legend(named, colours), font_size=11, fill=FAINT),
        "",
    )
    return document(parts, width, height)


def _y(value: float, top: float) -> float:
    return TOP + HEIGHT * (1 - value / top)


def _path(curve: Curve, span: float, top: float, colour: str) -> str:
    """A line through the points; it ends at the first point above the picture."""
    points = []
    for x, y in curve:
        points.append(f"{LEFT + WIDTH * x / span:.2f} {_y(min(y, top), top):.2f}")
        if y > top:
            break
    return tag("path", d=f"M{'L'.join(points)}", stroke=colour)


def _legend(named: Mapping[str, Curve], colours: Sequence[str]) -> Iterator[str]:
    x = float(LEFT)
    for name, colour in zip(named, colours, strict=True):
        yield tag("rect", x=x, y=37, width=16, height=12, rx=2, fill=colour)
        yield tag("text", escape(name), x=x + 21, y=47)
        x += 38 + 6.4 * len(name)


def _axes(span: float, top: float, axes: tuple[str, str]) -> Iterator[str]:
    bottom = TOP + HEIGHT
    for x in ticks(span, WIDTH / 70):
        at = LEFT + WIDTH * x / span
        yield tag("rect", x=at, y=bottom, width=1, height=5)
        yield tag("text", f"{x:.6g}", x=at, y=bottom + 18, text_anchor="middle")
    for y in ticks(top, HEIGHT / 50):
        text = tag("text", f"{y:.6g}", x=LEFT - 8, y=_y(y, top) + 4, text_anchor="end")
        yield text
    middle = LEFT + WIDTH / 2
    yield tag("text", escape(axes[0]), x=middle, y=bottom + 35, text_anchor="middle")
    yield tag("text", escape(axes[1]), x=8, y=TOP - 6)
