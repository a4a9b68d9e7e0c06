"""Pictures of timelines: SVG, an interactive HTML page, and text."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from ..clock.links import LinkUse
from ..clock.timeline import Event
from ..jobs.job import Direction, PlanError
from ..jobs.user_values import is_count, shown
from . import page, svg, text_diagram
from .notebook import figure
from .palette import Clock, clock
from .plan_page import Details
from .timeline_arrays import Bars, bars_of

WIDEN = "widen the terminal or set COLUMNS={}"


def terminal_columns() -> int:
    """How wide the terminal is, or else 100."""
    return shutil.get_terminal_size((100, 24)).columns


@dataclass(frozen=True, eq=False)
class Diagram:
    """A picture of a timeline: print it, save it, or show it in a notebook.

    bars: the jobs.
    title: the heading of the picture.
    release: the direction after which a stage's activations are freed.
    unit: the unit of the times. Seconds ("s") are shown as ms or µs if they are short.
    details: details of a plan, and links: of a simulated network, for the HTML page.
    """

    bars: Bars
    title: str = ""
    release: Direction = Direction.BACKWARD
    unit: str = ""
    details: Details | None = None
    links: tuple[LinkUse, ...] = ()

    def svg(self) -> str:
        """An SVG picture of at most a few MB.

        If there are too many jobs for bars of their own, each pixel has the mean colour
        of the jobs in it.
        """
        title, summary = self._heading
        return svg.render(self.bars, title, summary, self._clock)

    def html(self) -> str:
        """An HTML page with zoom, details of each job, and each worker's memory.

        The page needs no network. For a plan it also shows the stages, and bytes by
        link; for a simulated Network or Link, when its links are busy.
        """
        placed = self.bars, *self._heading, self._clock, self.release
        return page.render(*placed, self.details, self.links)

    def text(self, width: int | None = None, color: bool = False) -> str:
        """The picture as lines of text.

        width: the number of columns; by default that of the terminal, or else 100.
        color: whether to use ANSI colours.
        Raises PlanError if width isn't an int of 1 or more.
        """
        if width is not None and not is_count(width):
            raise PlanError(
                f"Diagram.text(width={shown(width)}): give an int of 1 or more, or None"
            )
        wider = "use text({})"
        if width is None:
            width, wider = terminal_columns(), WIDEN
        heading = ": ".join(filter(None, self._heading))
        placed = self.bars, heading, self._clock, width, color
        return text_diagram.render(*placed, wider)

    def unseen(self) -> str:
        """How wide a terminal shows each job as text; empty if this one does."""
        return text_diagram.unseen(self.bars, terminal_columns(), WIDEN)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes a file in the format of its extension: .svg, .html or .txt.

        Raises PlanError for any other extension.
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
    release: Direction = Direction.BACKWARD,
    unit: str = "",
    step: tuple[float, float] | None = None,
) -> Diagram:
    """Makes a picture of a timeline, simulated or measured.

    release: the direction after which a stage's activations are freed: B, or W if the
        backward is split.
    unit: the unit of the times, such as "s" for seconds.
    step: the start and end of the step; by default the first start and the last end.
    Raises PlanError for workers that don't exist, and for impossible times.
    """
    return Diagram(bars_of(events, workers, step), title, release, unit)
