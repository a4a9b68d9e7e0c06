"""Pictures of timelines: SVG, a page to look around in, and text for a text_diagram."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from ..clock.timeline import Event
from ..jobs.job import Direction, PlanError
from ..jobs.user_values import is_count, shown
from . import page, svg, text_diagram
from .notebook import figure
from .palette import Clock, clock
from .plan_page import Details
from .timeline_arrays import Bars, bars_of

FORWARD, BACKWARD, WEIGHT, _ = Direction


@dataclass(frozen=True, eq=False)
class Diagram:
    """A timeline to be looked at; print it, save it, or let a notebook show it.

    bars: the jobs.
    release: the job that lets go of a stage's activations.
    unit: of the times; seconds ("s") are shown as ms or µs where that suits.
    details: of a plan; its page shows them too.
    """

    bars: Bars
    title: str = ""
    release: Direction = BACKWARD
    unit: str = ""
    details: Details | None = None

    def svg(self) -> str:
        """An SVG picture of at most a few MB: where jobs are too many for bars of their
        own, pixels have the mean colour of the jobs in them."""
        title, summary = self._heading
        return svg.render(self.bars, title, summary, self._clock)

    def html(self) -> str:
        """A page that needs no network: zoom, details of each job, and memory; of a
        plan also its stages, and bytes by link."""
        placed = self.bars, *self._heading, self._clock, self.release
        return page.render(*placed, self.details)

    def text(self, width: int | None = None, color: bool = False) -> str:
        """Rows of characters.

        width: in characters; that of the terminal, or 100, unless given.
        color: with ANSI colours.
        Raises PlanError for a width that is no int of 1 or more.
        """
        if width is not None and not is_count(width):
            raise PlanError(
                f"Diagram.text(width={shown(width)}): give an int of 1 or more, or None"
            )
        if width is None:
            width = shutil.get_terminal_size((100, 24)).columns
        heading = ": ".join(filter(None, self._heading))
        return text_diagram.render(self.bars, heading, self._clock, width, color)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes a file in the format that its name ends with: .svg, .html or .txt.

        Raises PlanError for other names.
        """
        path = Path(path)
        makers = {".svg": self.svg, ".html": self.html, ".txt": self._plain}
        make = makers.get(path.suffix.lower())
        if make is None:
            raise PlanError(
                f"save({str(path)!r}): give a name that ends with {', '.join(makers)}"
            )
        path.write_text(make(), encoding="utf-8")

    def _plain(self) -> str:
        return self.text(100) + "\n"

    @property
    def _clock(self) -> Clock:
        return clock(self.bars.span, self.unit)

    @property
    def _heading(self) -> tuple[str, str]:
        if not len(self.bars):
            return self.title, "no jobs"
        step = self._clock.text(self.bars.span)
        return self.title, f"step {step}, bubble {100 * self.bars.bubble:.1f} %"

    def __str__(self) -> str:
        return self.text()

    def _repr_svg_(self) -> str:
        return self.svg()

    def _repr_html_(self) -> str:
        label = ": ".join(filter(None, self._heading))
        return figure(self.svg(), label, "the same in characters", self.text(100))


def draw(
    events: Sequence[Event],
    workers: int,
    title: str = "",
    release: Direction = BACKWARD,
    unit: str = "",
    step: tuple[float, float] | None = None,
) -> Diagram:
    """A picture of a timeline, simulated or measured.

    release: the job that lets go of a stage's activations: B, or W where the backward
        is split.
    unit: of the times, "s" for seconds.
    step: when the step began and ended; the first start and the last end unless given.
    Raises PlanError for workers that there aren't, and times that don't make sense.
    """
    return Diagram(bars_of(events, workers, step), title, release, unit)
