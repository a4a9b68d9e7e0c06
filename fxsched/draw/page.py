"""A timeline as one HTML page: page.html with the jobs and colours put into it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from ..clock.links import LinkUse
from ..jobs.job import Direction
from .palette import Clock, hexadecimal, palette
from .plan_page import Details, link_section, sections
from .timeline_arrays import LETTERS, Array, Bars, bytes_held, held

HELD = (
    "<p>Activations: microbatches of stages, from the start of F to the end of {}.</p>"
)


def render(
    bars: Bars,
    title: str,
    summary: str,
    clock: Clock,
    release: Direction,
    details: Details | None = None,
    links: Sequence[LinkUse] = (),
) -> str:
    """The text of a page that needs no network.

    Its <script id="data"> is JSON: columns of jobs, sorted by worker and start, and
    what each worker holds over time. The microbatch of those on all rows is `joint`.
    details: of a plan, which are shown too. links: of a simulated network.
    """
    shown = max([2, *bars.directions]) + 1  # U only where it is
    colours = palette(bars.microbatches, bars.meets)[:, :shown]
    stages = palette(int(bars.named.max(initial=0)) + 1)[:, :shown]
    kept = held(bars, release) if details is None else bytes_held(bars, details.held)
    data = {
        "title": title,
        "summary": summary,
        "factor": clock.factor,
        "unit": clock.unit,
        "workers": bars.workers,
        "span": bars.span,
        "heldBytes": details is not None,
        "heldCaption": "activations held" if details is None else "memory held",
        "sample": bars.sample,
        "palette": [list(map(hexadecimal, row)) for row in colours],
        "stagePalette": [list(map(hexadecimal, row)) for row in stages],
        "modules": {s: text.modules for s, text in details.texts.items()}
        if details is not None
        else {},
        "stage": bars.named.tolist(),
        "microbatch": bars.colour.tolist(),
        "joint": bars.microbatches if bars.meets else -1,
        "direction": "".join(LETTERS[d] for d in bars.direction),
        "worker": bars.worker.tolist(),
        "start": _short(bars.start),
        "end": _short(bars.end),
        "held": [
            {"times": _short(one.times), "counts": one.counts.tolist()} for one in kept
        ],
    }
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    below = HELD.format(release) if details is None else sections(details)
    parts = {
        "title": escape(title or "timeline"),
        "data": text.replace("<", "\\u003c"),
        "sections": f"{below}\n{link_section(links, bars.span, clock)}",
    }
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return re.sub(r"@(title|data|sections)@", lambda match: parts[match[1]], template)


def _short(times: Array) -> list[float]:
    """Times to ten digits, whole ones as integers: half the bytes."""
    rounded = [float(f"{time:.10g}") for time in times.tolist()]
    return [int(time) if time.is_integer() else time for time in rounded]
