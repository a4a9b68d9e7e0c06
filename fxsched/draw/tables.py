"""Tables as text, and those of simulated steps."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from tabulate import simple_separated_format, tabulate

from ..clock.links import LinkUse

if TYPE_CHECKING:  # it needs torch, and tables don't
    from ..accounts.workers import Worker

SIDES = {"l": "left", "r": "right"}
WIDTH = 88  # of what is printed unless asked otherwise
WIDE = 100  # of comparisons and of what explains a plan
GAP = 2  # columns between those of a table, if there is room
PAD = 2  # columns that a heading has more than its text, if there is room
ROWS = 16  # of stages, and of workers, that a summary shows
LEAST = 8  # characters that a cell keeps where a table is made to fit
UNIT = r"(?:%|[KMGTP]?i?B|[mµ]?s)(?![\w/])"  # stays with its number
AFTER_NUMBER = re.compile(rf"(?<=\d) (?={UNIT})")
# Where a cell may be wrapped.
WORDS = re.compile(rf"(?<=\D )|(?<=\d )(?!{UNIT})|(?<=[_.])(?=[^\W\d_])")
NAMES = 48  # characters of a list of names
ENDS = 16  # from so many on, a beginning and an end say more than an end


def table(
    headers: str,
    rows: Sequence[Sequence[object]],
    align: str = "l",
    width: int | None = None,
    cut: Sequence[str] | None = None,
    wrap: bool = False,
) -> str:
    """Rows below headers, without columns that are empty in all rows.

    headers: with | between. align: l or r for each column; the last holds for the rest.
    width: of a line at most; the longest cells are cut to fit, or, in the columns `cut`
        alone, as far as those go.
    wrap: instead of cutting, wrap the longest cells, between words alone; then narrow
        the gaps.
    """
    names = headers.split("|")
    cells = [[str(cell) for cell in row] for row in rows]
    used = [i for i in range(len(names)) if not cells or any(row[i] for row in cells)]
    sides = [SIDES[align.ljust(len(names), align[-1])[i]] for i in used]
    names, cells = [names[i] for i in used], [[row[i] for i in used] for row in cells]
    pad, gap = PAD, GAP
    if wrap and width is not None:
        if sum(_widths(names, cells, pad)) + GAP * (len(names) - 1) > width:
            pad, (gap, (names, *cells)) = 0, _wrapped([names, *cells], width)
    elif width is not None:
        may = [cut is None or name in cut for name in names]
        limit = _limit(names, cells, width, may)
        columns = zip(may, zip(*cells, strict=True), strict=False)
        short = [cut_names(column, limit) if m else column for m, column in columns]
        cells = [list(row) for row in zip(*short, strict=True)]
    rules = ["-" * size for size in _widths(names, cells, pad)]
    lines = [
        line
        for row in (names, rules, *cells)
        for line in zip_longest(*(cell.split("\n") for cell in row), fillvalue="")
    ]
    spaced = simple_separated_format(" " * gap)
    return tabulate(lines, tablefmt=spaced, disable_numparse=True, colalign=sides)


def columns(most: int = WIDTH) -> int:
    """How wide the terminal is, `most` at most, or if there is none."""
    return min(shutil.get_terminal_size((most, 24)).columns, most)


def wrapped(lines: Iterable[str], width: int | None = None) -> str:
    """Lines in so many columns; what is left of an indented one is indented by two
    more. Long paths stay whole."""
    whole = textwrap.TextWrapper(
        width or columns(), break_long_words=False, break_on_hyphens=False
    )
    parts = []
    for line in lines:
        text = line.lstrip()
        whole.initial_indent = indent = line[: len(line) - len(text)]
        whole.subsequent_indent = f"{indent}  " if indent else ""
        kept = AFTER_NUMBER.sub("\N{NO-BREAK SPACE}", text)
        parts += [each.replace("\N{NO-BREAK SPACE}", " ") for each in whole.wrap(kept)]
    return "\n".join(parts)


def html_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Rows below headers as HTML's table."""
    return str(tabulate(rows, headers, "html"))


def first_rows(
    headers: str, rows: Sequence[Sequence[object]], most: int = WIDTH
) -> str:
    """A table of the first ROWS rows, as wide as the terminal, `most` at most."""
    more = f"\nand {len(rows) - ROWS} more" if len(rows) > ROWS else ""
    return table(headers, rows[:ROWS], width=columns(most), wrap=True) + more


def _widths(
    names: Sequence[str], cells: Sequence[Sequence[str]], pad: int
) -> list[int]:
    """Of columns, with room for headings that are longer by `pad`."""
    columns = zip(names, *cells, strict=True)
    return [max(_width(n) + pad, *map(_width, rest), 0) for n, *rest in columns]


def _width(cell: str) -> int:
    return max(map(len, cell.split("\n")))


def _wrapped(rows: Sequence[Sequence[str]], width: int) -> tuple[int, list[list[str]]]:
    """A gap, and the rows with the longest cells in several lines, as few as fit the
    width."""
    longest = max(LEAST, *(_width(cell) for row in rows for cell in row))
    for gap in (GAP, 1):
        for limit in range(longest, LEAST - 1, -1):
            fit = [[_lines(cell, limit) for cell in row] for row in rows]
            if sum(_widths(fit[0], fit[1:], 0)) + gap * (len(rows[0]) - 1) <= width:
                return gap, fit
    return gap, fit


def _lines(cell: str, limit: int) -> str:
    """A cell in lines of so many characters, where no word is longer."""
    lines = [""]
    for word in WORDS.split(cell):
        if lines[-1] and len(f"{lines[-1]}{word}".rstrip()) > limit:
            lines.append("")
        lines[-1] += word
    return "\n".join(line.rstrip() for line in lines)


def _limit(
    names: Sequence[str],
    cells: Sequence[Sequence[str]],
    width: int,
    may: Sequence[bool],
) -> int:
    """The longest that cells of columns that may be cut are in lines of that width."""
    least = [len(name) + PAD for name in names]
    longest = [max(map(len, column)) for column in zip(*cells, strict=True)]
    limit = max(longest, default=LEAST)
    while limit > LEAST:
        widths = (
            max(a, min(b, limit) if m else b)
            for a, b, m in zip(least, longest, may, strict=True)
        )
        if sum(widths) + GAP * (len(names) - 1) <= width:
            break
        limit -= 1
    return limit


def cut_names(column: Sequence[str], limit: int) -> list[str]:
    """Cells of a column in `limit` characters, with .. for what is cut: the ends, the
    middles if much is left beside them, the beginnings, the middles, or all but where
    the cells begin to differ; the first of these that keeps the most cells different.
    """
    long = sorted({text for text in column if len(text) > limit})
    short = {text for text in column if len(text) <= limit}
    same = len(os.path.commonprefix(long))  # noqa: RUF071  # of characters
    room = limit - 2
    middles = {
        text: _parts(text[: room // 2], text[room // 2 - room :]) for text in long
    }
    ways = [
        {text: _parts(text[:room]) for text in long},
        *[middles] * (room >= ENDS),
        {text: _parts("", text[-room:]) for text in long},
        middles,
        {text: _parts("", text[same:][: room - 2], "") for text in long},
    ]
    best = max(ways, key=lambda cells: len({*cells.values(), *short}))
    return [best.get(text, text) for text in column]


def _parts(first: str, *rest: str) -> str:
    """Parts of a text, with .. for what is between and after them."""
    parts = [first, *rest] if rest else [first, ""]
    return "..".join(part.strip(" .") for part in parts)


def worker_table(workers: Sequence[Worker], latency: float) -> str:
    """A row for each worker of a simulated step; equal ones share a row."""
    same: dict[tuple[str, ...], list[int]] = {}
    updated = any(record.updates for record in workers)
    renewed = any(record.weights_renewed for record in workers)
    for number, record in enumerate(workers):
        size = "" if record.peak_bytes is None else f", {byte_text(record.peak_bytes)}"
        row = (
            f"{100 * record.busy / (latency or 1.0):.1f} %",
            f"{record.peak_activations}{size}",
            f"{record.weights_held}",
            f"{record.weight_fetches}",
            f"{record.activations_received}",
            f"{record.activations_sent}",
            f"{record.gradients_returned}",
            f"{record.updates}" if updated else "",
            f"{record.weights_renewed}" if renewed else "",
        )
        same.setdefault(row, []).append(number)
    rows = [(ranges(numbers), *row) for row, numbers in same.items()]
    headers = (
        "workers|busy|activations|weights|fetches|received|sent|returned|updates|"
        "renewed"
    )
    return table(headers, rows, "r", columns(WIDE), wrap=True)


def link_rows(links: Sequence[LinkUse], step: float) -> list[tuple[LinkUse, str, str]]:
    """Links with their bytes and the share of the step in which they are busy; of more
    than ROWS, the busiest first."""
    if len(links) > ROWS:
        links = sorted(links, key=lambda use: -use.seconds)
    share = 100 / (step or 1.0)
    return [(u, byte_text(u.bytes), f"{share * u.seconds:.1f} %") for u in links]


def link_table(links: Sequence[LinkUse], step: float) -> tuple[str, ...]:
    """A table of links; nothing if there are none."""
    rows = [(use.name, *cells) for use, *cells in link_rows(links, step)]
    return (first_rows("link|bytes|busy", rows),) if rows else ()


def ranges(numbers: Sequence[int]) -> str:
    """Increasing numbers as they fit: 0..3, 8, 10..12."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return shorten(["..".join(map(str, run)) for run in runs], 32)


def shorten(names: Sequence[str], limit: int = NAMES) -> str:
    """Names as they fit: all of them, or the first and the last."""
    text = ", ".join(names)
    if len(text) <= limit or len(names) < 3:
        return text
    return f"{names[0]} .. {names[-1]}, {len(names)} in all"


def module_text(names: Sequence[str]) -> str:
    """Names of modules as they fit: all, or the first and the last, without the parent
    that both have: encoder.embed .. layers.1."""
    text = ", ".join(names)
    if len(text) <= NAMES or len(names) < 3:
        return text
    first, last = names[0].split("."), names[-1].split(".")
    same = len(os.path.commonprefix([first, last[:-1]]))  # noqa: RUF071  # of parents
    while same and last[same][:1].isdigit():  # a layer's number needs its list's name
        same -= 1
    return f"{names[0]} .. {'.'.join(last[same:])}"


def byte_text(count: float) -> str:
    """A number of bytes as 512 B, 1.5 KiB and so on."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
