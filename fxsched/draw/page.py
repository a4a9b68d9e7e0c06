"""A timeline as one HTML page: page.html with the jobs and colours put into it."""

from __future__ import annotations

import json
import re
from html import escape
from importlib.resources import files

from ..jobs.job import Direction
from .palette import Clock, hexadecimal, palette
from .timeline_arrays import LETTERS, Array, Bars, held


def render(
    bars: Bars, title: str, summary: str, clock: Clock, release: Direction
) -> str:
    """The text of a page that needs no network.

    Its <script id="data"> is JSON: columns of jobs, sorted by worker and start, and
    what each worker holds over time. The microbatch of those on all rows is `joint`.
    """
    shown = max([2, *bars.directions]) + 1  # U only where it is
    colours = palette(bars.microbatches, bars.meets)[:, :shown]
    data = {
        "title": title,
        "summary": summary,
        "factor": clock.factor,
        "unit": clock.unit,
        "workers": bars.workers,
        "span": bars.span,
        "release": str(release),
        "palette": [list(map(hexadecimal, row)) for row in colours],
        "stage": bars.named.tolist(),
        "microbatch": bars.colour.tolist(),
        "joint": bars.microbatches if bars.meets else -1,
        "direction": "".join(LETTERS[d] for d in bars.direction),
        "worker": bars.worker.tolist(),
        "start": _short(bars.start),
        "end": _short(bars.end),
        "held": [
            {"times": _short(one.times), "counts": one.counts.tolist()}
            for one in held(bars, release)
        ],
    }
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    parts = {"title": escape(title or "timeline"), "data": text.replace("<", "\\u003c")}
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return re.sub(r"@(title|data)@", lambda match: parts[match[1]], template)


def _short(times: Array) -> list[float]:
    """Times to ten digits, whole ones as integers: half the bytes."""
    rounded = [float(f"{time:.10g}") for time in times.tolist()]
    return [int(time) if time.is_integer() else time for time in rounded]
