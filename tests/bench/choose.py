"""Which schedule for which model: simulated steps of the library on a chain of blocks.

Four workers; F of a microbatch through the whole model takes 1, B 2. A step is given in
times of one without any idle worker; messages take turns on a link between each pair
of workers, weights are asked for a job ahead.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import networkx as nx

from fxsched import Link, Schedule, schedules, simulate

WORKERS = 4
MICROBATCHES = (8, 32)
LINKS = {  # what all weights take on the way, and one microbatch's activations
    "fast": (0.5, 0.01),
    "large model": (4.0, 0.02),
    "slow": (4.0, 0.1),
}
# Each with as many stages as it is cut into here.
SCHEDULES: dict[str, tuple[int, Callable[[int], Schedule]]] = {
    "ddp": (8, lambda m: schedules.ddp(WORKERS, m)),
    "fsdp": (8, lambda m: schedules.fsdp(WORKERS, m)),
    "gpipe": (4, lambda m: schedules.gpipe(WORKERS, m)),
    "1f1b": (4, lambda m: schedules.one_f_one_b(WORKERS, m)),
    "1f1b, ahead=2": (4, lambda m: schedules.one_f_one_b(WORKERS, m, ahead=2)),
    "interleaved": (8, lambda m: schedules.interleaved(WORKERS, m)),
    "zb_h1": (4, lambda m: schedules.zb_h1(WORKERS, m)),
    "zb_v": (8, lambda m: schedules.zb_v(WORKERS, m)),
    "v_min": (8, lambda m: schedules.v_min(WORKERS, m)),
    "lpp, group_size=2": (4, lambda m: schedules.lpp(WORKERS, 2, m)),
}


def run(options: argparse.Namespace) -> int:
    print(table())
    return 0


def table() -> str:
    """Markdown: a row for each schedule, the shortest step of a column in bold."""
    rows = {name: list(_steps(*each)) for name, each in SCHEDULES.items()}
    least = [min(column) for column in zip(*rows.values(), strict=True)]
    kinds = [f"{m}, {link}" for m in MICROBATCHES for link in LINKS]
    lines = [
        f"| | weights | activations | {' | '.join(kinds)} |",
        "|---" * (3 + len(kinds)) + "|",
    ]
    for name, steps in rows.items():
        weights, held = _memory(*SCHEDULES[name])
        figures = [
            f"**{step:.2f}**" if step == best else f"{step:.2f}"
            for step, best in zip(steps, least, strict=True)
        ]
        cells = [f"`{name}`", f"{weights:.2f}", f"{held:.2f}", *figures]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _steps(stages: int, make: Callable[[int], Schedule]) -> Iterator[float]:
    """A step for each number of microbatches and each kind of link."""
    for microbatches in MICROBATCHES:
        for weights, sent in LINKS.values():
            done = simulate(
                make(microbatches),
                _chain(stages, weights, sent),
                durations=None,
                transfer=Link(1.0),
                prefetch=1,
            )
            yield round(done.latency / (3 * microbatches / WORKERS), 2)


def _memory(stages: int, make: Callable[[int], Schedule]) -> tuple[float, float]:
    """What the worker that holds most has: weights, fetched ones included, of the
    model's, and activations, of those of one microbatch."""
    chain = _chain(stages, 1.0, 0.0)
    peaks = simulate(make(MICROBATCHES[0]), chain, durations=None).memory
    weights = max(peak.each.weights + peak.each.fetched for peak in peaks)
    return weights, max(peak.each.activations for peak in peaks)


def _chain(stages: int, weights: float, sent: float) -> nx.DiGraph[int]:
    """Stages of equal work; their gradients are as large as their weights."""
    chain: nx.DiGraph[int] = nx.DiGraph()
    for s in range(stages):
        share = 1 / stages
        chain.add_node(
            s,
            forward=share,
            backward=2 * share,
            held=share,
            weights=2 * weights * share,
        )
        if s:
            chain.add_edge(s - 1, s, bytes=sent)
    return chain
