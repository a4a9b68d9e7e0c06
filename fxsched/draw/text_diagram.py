"""A timeline as text: rows are workers, columns time."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from .palette import Clock, palette, ticks
from .timeline_arrays import LETTERS, NAMES, Array, Bars, Labels, cell_means

ROWS = 64  # from there on workers share rows
LEAST = 20  # columns
WIDEST = 250  # that a terminal may have
IDLE, UPDATE = ".", LETTERS.index("U")


def render(
    bars: Bars, heading: str, clock: Clock, width: int, color: bool, wider: str
) -> str:
    """Lines of at most `width` characters, ANSI colours not counted.

    wider: what the reader does for a picture of so many columns; {} is their number.

    A job is its name, or its direction and microbatch, or its direction, and dashes as
    far as it goes; where jobs are shorter than a character, each character is the
    direction of most of them, or a dot. The last line says which.
    """
    rows = min(bars.workers, ROWS)
    names = _names(bars.workers, rows)
    margin = _margin(names)
    room = max(width - margin, LEAST)
    columns = _columns(bars, room)
    cells = Cells(bars, rows, columns)
    lines = [heading, "worker"]
    for row, name in enumerate(names):
        lines.append(f"{name:>{margin - 2}}  {cells.line(row, color)}")
    lines.append(f"{'time':>{margin - 2}}  {_axis(bars, clock, columns)}")
    if len(bars) and bars.span:
        lines.append("")
        for sentence in _key(bars, cells, margin, wider):
            lines += textwrap.wrap(sentence, margin + room)
    return "\n".join(line.rstrip() for line in lines)


def unseen(bars: Bars, width: int, wider: str) -> str:
    """How wide a picture shows each job, if one of so many characters doesn't."""
    margin = _margin(_names(bars.workers, min(bars.workers, ROWS)))
    columns = _columns(bars, max(width - margin, LEAST))
    return "" if _drawn(bars, columns) else _to_see_each(bars, columns, margin, wider)


def _margin(names: Sequence[str]) -> int:
    return max(map(len, ["worker", *names])) + 2


def _drawn(bars: Bars, columns: int) -> bool:
    """Whether each job has a character, but for some that are short."""
    times = bars.end - bars.start
    usual = float(np.median(times)) if len(times) else 0.0
    return bars.workers <= ROWS and usual * columns >= bars.span


def _to_see_each(bars: Bars, columns: int, margin: int, wider: str) -> str:
    shortest = _shortest(bars) * (bars.workers <= ROWS)
    each = math.ceil(bars.span / shortest) if shortest else 0
    return f"To see each job, {_way(wider, margin + each)}." if each > columns else ""


def _names(workers: int, rows: int) -> list[str]:
    """The worker of each row, or its first and last."""
    first = [-(-row * workers // rows) for row in range(rows + 1)]
    return [f"{a}" if b - a == 1 else f"{a}..{b - 1}" for a, b in pairwise(first)]


def _key(bars: Bars, cells: Cells, margin: int, wider: str) -> list[str]:
    """What the characters stand for, and how wide a picture shows more."""
    words = [f"{LETTERS[d]} {NAMES[d]}" for d in bars.directions]
    if cells.labels is None:
        key = f"{', '.join(words)}, as most of a character's time; dots: idle"
        hint = _to_see_each(bars, cells.shape[1], margin, wider)
        return [key, *[hint] * bool(hint)]
    texts, least, whole, room = cells.labels
    drawn = [i for i, text in enumerate(texts) if text]
    for i in sorted(drawn, key=lambda i: int(bars.direction[i]))[:1]:  # explains one
        d = int(bars.direction[i])
        of = "all rows" if bars.joint[i] else f"microbatch {bars.microbatch[i]}"
        if texts[i] == bars.name(i):
            of = f"stage {bars.named[i]}, {of}"
        words[bars.directions.index(d)] = f"{texts[i]} {NAMES[d]} of {of}"
    hidden = {least: "microbatches", whole: "stages"}
    more = [
        f"To see {what}, {_way(wider, margin + _columns_for(bars, each))}."
        for each, what in hidden.items()
        if each > room
    ]
    dots = "idle, or a job too short to draw" if cells.lost else "idle"
    return [f"{', '.join(words)}; dots: {dots}", *more[:1]]


def _way(wider: str, columns: int) -> str:
    """To a picture of so many columns, or to one that isn't text."""
    return wider.format(columns) if columns <= WIDEST else "save it as .svg or .html"


def _columns_for(bars: Bars, characters: int) -> int:
    """How many give the usual job of the shortest direction so many characters."""
    short, usual = _shortest(bars), bars.usual_least(bars.end - bars.start)
    return math.ceil(math.ceil(characters * short / usual) * bars.span / short)


def _shortest(bars: Bars) -> float:
    """How long the shortest job takes, of those that take any time."""
    times = bars.end - bars.start
    return float(min(times[times > 0], default=0.0))


def _columns(bars: Bars, room: int) -> int:
    """As many as there is room for, and for the shortest job a whole number."""
    short = _shortest(bars)
    each = int(room * short / bars.span + 1e-9) if bars.span else 0
    return round(each * bars.span / short) if each else room


class Cells:
    """The characters of all rows, and what colours are behind them."""

    def __init__(self, bars: Bars, rows: int, columns: int) -> None:
        self.shape = rows, columns
        self.text = np.full((rows, columns), IDLE)
        self.ground = np.full((rows, columns, 3), -1)
        self.colours = palette(bars.microbatches, bars.meets)
        alone = _drawn(bars, columns)
        self.labels: Labels | None = None  # unless each job is drawn
        self.lost = False  # whether some jobs have no character
        if len(bars) and bars.span and alone:
            self.labels = self._jobs(bars)
        elif len(bars) and bars.span:
            self._means(bars)

    def _jobs(self, bars: Bars) -> Labels:
        scale = self.shape[1] / bars.span
        first = np.rint(bars.start * scale).astype(int)
        last = np.rint(bars.end * scale).astype(int)
        labels = Labels.of(bars, last - first, gap=1)
        for i, (a, z) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
            b, d, row = bars.colour[i], bars.direction[i], bars.worker[i]
            text = labels.texts[i] or LETTERS[d]
            text = text.ljust(z - a, "-")[: z - a]
            if len(text) > 2 and text[-1] == "-":
                text = text[:-1] + " "  # apart from the next one
            self.text[row, a:z] = list(text)
            self.ground[row, a:z] = self.colours[b, d]
        self.lost = bool(((first == last) & (bars.direction != UPDATE)).any())
        for i in np.flatnonzero(bars.direction == UPDATE).tolist():
            if first[i] == last[i]:
                self._mark(bars, i, int(first[i]))
        return labels

    def _mark(self, bars: Bars, i: int, at: int) -> None:
        """The letter of an update that is shorter than a character: where it is idle,
        or over the last character of the job before."""
        row, b, d = bars.worker[i], bars.microbatch[i], bars.direction[i]
        if at == self.shape[1] or (at and self.text[row, at] != IDLE):
            at -= 1
        self.text[row, at], self.ground[row, at] = LETTERS[d], self.colours[b, d]

    def _means(self, bars: Bars) -> None:
        share = cell_means(bars, np.eye(len(LETTERS))[bars.direction], *self.shape)
        most = share.argmax(2)
        idle = 1 - share.sum(2) > share.max(2)
        self.text = np.where(idle, IDLE, np.array(list(LETTERS))[most])
        rgb = self.colours[bars.colour, bars.direction]
        values = np.concatenate((rgb, np.ones((len(bars), 1))), 1)
        means = cell_means(bars, values, *self.shape)
        mixed = np.rint(means[:, :, :3] / np.maximum(means[:, :, 3:], 1e-9))
        self.ground = np.where(idle[:, :, None], -1, mixed.astype(int))

    def line(self, row: int, color: bool) -> str:
        """A worker's row as text, coloured if asked for."""
        text = "".join(self.text[row]).rstrip()
        if not color:
            return text
        return "".join(_painted(text, self.ground[row]))


def _painted(text: str, ground: Array) -> Iterator[str]:
    """Runs of one colour as ANSI sequences."""
    edges = np.flatnonzero((np.diff(ground, axis=0) != 0).any(1)) + 1
    bounds = [0, *edges.tolist(), len(text)]
    for a, b in pairwise(bounds):
        r, g, blue = ground[a].tolist()
        if r < 0:
            yield text[a:b]
            continue
        ink = 0 if 0.3 * r + 0.6 * g + 0.1 * blue > 125 else 15
        yield f"\x1b[48;2;{r};{g};{blue};38;5;{ink}m{text[a:b]}\x1b[0m"


def _axis(bars: Bars, clock: Clock, columns: int) -> str:
    """Ticks under their columns, as far as there is room for the unit after them."""
    line, room = "", columns - len(clock.unit) - 1
    span = bars.span * clock.factor
    for time in ticks(span, columns / 7.5):
        at = int(columns * time / span) if span else 0
        text = f"{time:g}"
        if at + len(text) <= room or not line:
            line = line.ljust(at) + text
    return f"{line} {clock.unit}"
