"""What a page shows below its timeline: a plan's stages and bytes; the use of links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

import networkx as nx
import numpy as np

from ..clock.links import LinkUse
from .palette import Clock, hexadecimal, palette
from .svg_layout import document, group, tag
from .tables import ROWS, byte_text, cut_names, html_table, link_rows

if TYPE_CHECKING:  # it needs torch, and pictures don't
    from ..accounts.held import During

BOX, HEIGHT, ACROSS, DOWN, EDGE, LANE = 168, 66, 84, 22, 16, 18  # pixels
LETTERS = 22  # of a line in a box
LARGEST = ("from", "to", "bytes")
COLUMNS, LEVELS = 1000, 4  # of a link's picture, and its shades
MOST = 12  # workers in a square table of links; of more, the largest links are listed


class StageText(NamedTuple):
    """A stage in words; workers: that run it, as 0..3. share: of the work."""

    name: str
    modules: str
    workers: str
    share: str


class Details(NamedTuple):
    """What is known of a plan besides its jobs' times.

    stages: of the model, their edges with bytes of a microbatch. texts: of stages.
    held: bytes, by worker. sent: bytes by sender and receiver.
    """

    stages: nx.DiGraph[int]
    texts: Mapping[int, StageText]
    held: Sequence[During]
    sent: Mapping[tuple[int, int], int]


def sections(details: Details) -> str:
    """HTML of what is shown below the timeline."""
    links = _links(details.sent, len(details.held))
    return "\n".join(
        (
            "<p>Memory: weights, gradients, the optimizer's state, activations, and "
            "what a job needs while it runs.</p>",
            "<h2>Stages, and the bytes of a microbatch that one passes to another</h2>",
            f'<div class="wide" id="stages">{stage_picture(details)}</div>',
            "<h2>Bytes of a step by link</h2>",
            f'<div class="wide" id="links">{links}</div>',
        )
    )


def stage_picture(details: Details) -> str:
    """Stages from left to right as data flows, in boxes, as SVG."""
    graph = details.stages.copy()
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    layers = [sorted(layer) for layer in nx.topological_generations(graph)]
    tall = max(map(len, layers), default=0) * (HEIGHT + DOWN)
    place = {
        stage: (
            EDGE + x * (BOX + ACROSS),
            EDGE + (tall - len(layer) * (HEIGHT + DOWN)) / 2 + y * (HEIGHT + DOWN),
        )
        for x, layer in enumerate(layers)
        for y, stage in enumerate(layer)
    }
    lanes = _lanes(graph, {s: x for x, layer in enumerate(layers) for s in layer})
    colours = [hexadecimal(row[0]) for row in palette(len(place))]
    parts = (
        "",
        group("edges", _edges(graph, place, lanes, tall), font_size=11),
        group("boxes", _boxes(details, place, colours), font_size=12),
        "",
    )
    width = 2 * EDGE + len(layers) * (BOX + ACROSS) - ACROSS
    below = LANE * (1 + max(lanes.values(), default=-1))
    return document(parts, width, tall + EDGE + below)


def _lanes(
    graph: nx.DiGraph[int], layer: Mapping[int, int]
) -> dict[tuple[int, int], int]:
    """Edges past other layers, each with its lane below the boxes: short ones above
    longer ones, and none over another."""
    lanes: dict[tuple[int, int], int] = {}
    for a, z in sorted(graph.edges, key=lambda e: (layer[e[1]] - layer[e[0]], e)):
        if layer[z] - layer[a] > 1:
            beside = ((b, y) for b, y in lanes if layer[b] < layer[z])
            taken = {lanes[b, y] for b, y in beside if layer[a] < layer[y]}
            lanes[a, z] = min(set(range(len(lanes) + 1)) - taken)
    return lanes


def _edges(
    graph: nx.DiGraph[int],
    place: Mapping[int, tuple[float, float]],
    lanes: Mapping[tuple[int, int], int],
    tall: float,
) -> Iterator[str]:
    """Curves between boxes, then the bytes on each, so that no curve covers a text."""
    texts = []
    for maker, reader, data in graph.edges(data=True):
        x, y = place[maker][0] + BOX, place[maker][1] + HEIGHT / 2
        to, down = place[reader][0], place[reader][1] + HEIGHT / 2
        if (maker, reader) in lanes:
            low = EDGE + tall - DOWN + LANE * (1 + lanes[maker, reader])
            y, down = y + HEIGHT / 4, down + HEIGHT / 4  # apart from direct ones
            curve = _curve(x, y, x + ACROSS, low)
            curve += f"H{to - ACROSS:g}" + _curve(to - ACROSS, low, to, down)
            at, middle = x + ACROSS + BOX / 2, low - 5
        elif y == down:
            curve, at, middle = _curve(x, y, to, down), x + ACROSS / 2, y - 5
        else:  # nearer to its start, where fewer meet, unless others pass there
            curve = _curve(x, y, to, down)
            left, top = place[maker]
            above = (place[a] for a, _ in lanes)
            passed = any(side == left and over < top for side, over in above)
            at = x + (0.75 if passed else 0.38) * ACROSS
            middle = y + (0.9 if passed else 0.28) * (down - y) + 4
        yield tag("path", d=f"M{x:g} {y:g}{curve}", **{"class": "edge"})
        text = byte_text(data.get("bytes", 0))
        where = {"x": at, "y": middle, "text_anchor": "middle"}
        texts.append(tag("text", text, **where, **{"class": "faint"}))
    yield from texts


def _curve(x: float, y: float, to: float, down: float) -> str:
    bend = (x + to) / 2
    return f"C{bend:g} {y:g} {bend:g} {down:g} {to:g} {down:g}"


def _boxes(
    details: Details,
    place: Mapping[int, tuple[float, float]],
    colours: Sequence[str],
) -> Iterator[str]:
    modules = [details.texts[stage].modules for stage in sorted(place)]
    lines = zip(colours, sorted(place), cut_names(modules, LETTERS), strict=True)
    for colour, stage, cut in lines:
        text, (x, y) = details.texts[stage], place[stage]
        plural = "s" * (not text.workers.isdigit())
        hint = tag("title", escape(text.modules))
        yield tag("rect", hint, x=x, y=y, width=BOX, height=HEIGHT, rx=5, fill=colour)
        head = f"stage {text.name}, worker{plural} {text.workers}"
        for i, line in enumerate((head, cut, f"{text.share} of the work")):
            words = escape(line)
            yield tag("text", words, x=x + 9, y=y + 20 + 18 * i, fill="#1f2328")


def _links(sent: Mapping[tuple[int, int], int], workers: int) -> str:
    """An HTML table of senders and receivers, or of the largest links."""
    if not sent:
        return "No worker sends another anything."
    text = {pair: byte_text(size) for pair, size in sent.items() if size}
    if workers <= MOST:
        every = range(workers)
        rows = [[a, *(text.get((a, b), "") for b in every)] for a in every]
        return html_table(["from, to", *map(str, every)], rows)
    largest = sorted(text, key=lambda pair: -sent[pair])[:MOST]
    return html_table(LARGEST, [[*pair, text[pair]] for pair in largest])


def link_section(links: Sequence[LinkUse], step: float, clock: Clock) -> str:
    """HTML of the links of a network, and when they are busy; nothing without links."""
    if not links:
        return ""
    names = "link", "bytes", "busy", f"when it is busy, from 0 to {clock.text(step)}"
    rows = [[tag("th", name) for name in names]]
    for use, size, share in link_rows(links, step)[:ROWS]:
        hint = f"{use.name}: {size}, busy {share} of the step"
        cells = use.name, size, share, _strip(use, step, hint)
        rows.append([tag("td", cell) for cell in cells])
    table = "\n".join(tag("tr", "".join(row)) for row in rows)
    some = f": the {ROWS} busiest of {len(links)} links" * (len(links) > ROWS)
    return (
        f"<h2>Use of the network{some}</h2>\n"
        f'<div class="wide"><table id="network">{table}</table></div>'
    )


def _strip(use: LinkUse, step: float, hint: str) -> str:
    """When a link is busy, as SVG: a column is as dark as the link is busy in it."""
    times = np.array(use.busy)
    busy = np.repeat(np.cumsum(times[:, 1] - times[:, 0]), 2)
    until = np.concatenate(([0.0], busy[:-1]))  # each start and end
    spent = np.interp(np.linspace(0, step, COLUMNS + 1), times.ravel(), until)
    shade = np.ceil(LEVELS * COLUMNS / step * np.diff(spent) - 1e-6)
    first = np.flatnonzero(np.diff(shade, prepend=-1.0))
    runs = zip(first.tolist(), np.diff(first, append=COLUMNS).tolist(), strict=True)
    parts = (
        tag("rect", x=x, width=wide, height=1, opacity=shade[x] / LEVELS)
        for x, wide in runs
        if shade[x]
    )
    box = {"viewBox": f"0 0 {COLUMNS} 1", "preserveAspectRatio": "none"}
    return tag("svg", "".join((tag("title", hint), *parts)), role="img", **box)
