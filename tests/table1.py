"""Table 1 of parallelsim, as it holds: formulas of latency and memory, and simulations;
python -m tests.table1 prints them.

The table is that of github.com/a-rahimi/parallel-training, for S equal stages, B
microbatches, W workers in G groups of R, and k = B / G. One F + B of a stage is one
unit of time: F lasts 1 and B 2 here, and latencies are divided by 3. Four of its
formulas hold in other words than it has them: the latency of LPP, the activations of PP
and the weights of FSLPP, and the bound on the throughput.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from fxsched import Schedule, Simulation, simulate
from fxsched.draw import tables
from fxsched.schedules import (
    ddp,
    folded,
    fsdp,
    fslpp,
    looped_bfs,
    lpp,
    one_f_one_b,
    replicate,
)

S = 8  # stages
UNIT = 3.0  # F + B


class Row(NamedTuple):
    """A formula beside what a simulation finds.

    relation: of the simulated value to the formula's: = where they are equal, <= where
        the formula is a bound, > where it is said to be one, and is none.
    """

    scheme: str
    setting: str
    quantity: str
    formula: str
    expected: float
    relation: str
    simulated: float

    @property
    def holds(self) -> bool:
        """Whether the relation is the one that the row has."""
        near = abs(self.simulated - self.expected) < 1e-9
        less = self.simulated < self.expected
        return {"=": near, "<=": near or less, ">": not near and not less}[
            self.relation
        ]


def rows() -> list[Row]:
    """All rows, scheme by scheme."""
    parts = (_ddp(), _fsdp(), _pp(), _lpp(), _fslpp(), _throughput())
    return [row for part in parts for row in part]


def text() -> str:
    """The rows as a table."""
    headers = "scheme|setting|quantity|formula|value|simulated"
    return tables.table(headers, [_cells(row) for row in rows()])


def _cells(row: Row) -> tuple[str, ...]:
    is_how = {"=": "", "<=": ", within", ">": ", more"}[row.relation]
    simulated = f"{row.simulated:.4g}{is_how if row.holds else ', WRONG'}"
    return (*row[:4], f"{row.expected:.4g}", simulated)


def most_throughput(held: float, stages: int, durations: tuple[float, ...]) -> float:
    """The largest throughput of workers that hold `held` activations each, on average.

    durations: of F and B, or of F, B and W, equal for all stages of a chain.

    Throughput, rho, counts stages done (F and B, or F, B and W) per worker and time
    that one takes, so that 1 is every worker busy. From F of stage s to its B pass F
    and B of the stages s .. S-1, to W also W: an activation is held for at least
    (S - s)(F + B) + W, whichever workers run what, and transfers make it longer. Over
    B microbatches that is B S ((S + 1) / 2 (F + B) + W) of the W L M that there are.
    Without W, rho <= 2 M / (S + 1); the published M / S is too small by half. With
    F = B = W, rho <= 3 M / (S + 2).
    """
    forward, backward, *rest = durations
    weight = sum(rest)
    mean = (stages + 1) / 2 * (forward + backward) + weight
    return held * (forward + backward + weight) / mean


def _latency(simulation: Simulation) -> float:
    return simulation.latency / UNIT


def _fetched(simulation: Simulation) -> list[float]:
    """Weights fetched by each worker in each direction, anew for every job."""
    return [worker.weight_transmissions / 2 for worker in simulation.workers]


def _held(simulation: Simulation) -> list[int]:
    return [worker.peak_activations for worker in simulation.workers]


def _kept(simulation: Simulation) -> list[int]:
    return [worker.weights_held for worker in simulation.workers]


def _run(schedule: Schedule) -> Simulation:
    return simulate(schedule, S, {"F": 1, "B": 2})


def _ddp() -> list[Row]:
    ran, setting = _run(ddp(S)), f"S={S} W=B={S}"
    return [
        Row("DDP", setting, "latency", "S", S, "=", _latency(ran)),
        Row("DDP", setting, "weights fetched", "0", 0, "=", max(_fetched(ran))),
        Row("DDP", setting, "activations", "S", S, "=", max(_held(ran))),
        Row("DDP", setting, "weights kept", "S", S, "=", max(_kept(ran))),
    ]


def _fsdp() -> list[Row]:
    ran, setting = _run(fsdp(S)), f"S={S} W=B={S}"
    more, larger = _run(fsdp(S + 4)), f"S={S} W=B={S + 4}"
    owns_nothing = "S where none is kept"
    return [
        Row("FSDP", setting, "latency", "S", S, "=", _latency(ran)),
        Row("FSDP", setting, "weights fetched", "S-1", S - 1, "=", max(_fetched(ran))),
        Row("FSDP", larger, "weights fetched", owns_nothing, S, "=", _fetched(more)[S]),
        Row("FSDP", setting, "activations", "S", S, "=", max(_held(ran))),
        Row("FSDP", setting, "weights kept", "1", 1, "=", max(_kept(ran))),
    ]


def _pp() -> list[Row]:
    b = 64
    capped = one_f_one_b(S, b)
    ran, free = _run(capped), _run(replace(capped, in_flight=None))
    setting = f"S=W={S} B={b}"
    cap, no_cap = f"{setting}, cap S-s", f"{setting}, no cap"
    name, time, held = "PP", b + S - 1, "activations"
    found = [
        Row(name, cap, "latency", "B+S-1", time, "=", _latency(ran)),
        Row(name, no_cap, "latency", "B+S-1", time, "=", _latency(free)),
        Row(name, setting, "weights fetched", "0", 0, "=", max(_fetched(ran))),
        Row(name, no_cap, held, "min(S, B)", min(S, b), ">", max(_held(free))),
        Row(name, setting, "weights kept", "1", 1, "=", max(_kept(ran))),
    ]
    for s in range(S):
        formula, most = f"min(S-s, B), s={s}", min(S - s, b)
        found.append(Row(name, cap, held, formula, most, "=", _held(ran)[s]))
    return found


def _lpp() -> list[Row]:
    found = _order(16, 4, 2) + _order(16, 4, 4) + _order(8, 4, 8)
    ran = _run(lpp(8, 4, 16, S))
    most = S // 4 * min(S, 8)
    name, setting = "LPP", f"S={S} W=8 R=4 k=8, oldest first"
    return [
        *found,
        Row(name, setting, "latency", "(S/R)k+R-1", S // 4 * 8 + 3, ">", _latency(ran)),
        Row(name, setting, "weights fetched", "0", 0, "=", max(_fetched(ran))),
        Row(name, setting, "activations", "(S/R)min(S,k)", most, "<=", max(_held(ran))),
        Row(name, setting, "weights kept", "S/R", S // 4, "=", max(_kept(ran))),
    ]


def _order(w: int, r: int, k: int) -> list[Row]:
    """The latency of lpp's placement. In lpp's own order, oldest microbatch first, a
    step is longer than either formula where stages of a worker compete."""
    time = _latency(_run(replicate(looped_bfs(r, k, S), w // r)))
    setting = f"S={S} W={w} R={r} k={k}, breadth first"
    first, then = S + k - 1, S // r * k + r - 1
    relation = "=" if k <= r else ">"
    found = [Row("LPP", setting, "latency", "S+k-1", first, relation, time)]
    if k % r == 0:
        found.append(Row("LPP", setting, "latency", "(S/R)k+R-1", then, "=", time))
    return found


def _fslpp() -> list[Row]:
    w, r, k = 8, 4, 4
    ran = _run(fslpp(w, r, w // r * k, S))
    even = _run(fslpp(w, r, w // r * k, S, even=True))
    latency = _latency(_run(lpp(w, r, w // r * k, S)))
    published = f"S={S} W={w} R={r} k={k}, h(s,s)"
    spread = f"S={S} W={w} R={r} k={k}, s mod W"
    n, most = "FSLPP", S // r * min(S, k)
    return [
        Row(n, published, "latency", "as LPP", latency, "=", _latency(ran)),
        Row(n, published, "weights fetched", "S", S, "<=", max(_fetched(ran))),
        Row(n, published, "activations", "(S/R)min(S,k)", most, "<=", max(_held(ran))),
        Row(n, published, "weights kept", "1", 1, ">", max(_kept(ran))),
        Row(n, published, "workers without", "0", 0, ">", _kept(ran).count(0)),
        Row(n, spread, "latency", "as LPP", latency, "=", _latency(even)),
        Row(n, spread, "weights fetched", "S", S, "<=", max(_fetched(even))),
        Row(n, spread, "weights kept", "1", 1, "=", max(_kept(even))),
    ]


def _throughput() -> list[Row]:
    p, b, m = 8, 256, 8
    ran = simulate(folded(p, b, held=m))
    stages, rho = 2 * p, 1 - ran.bubble_rate
    least = most_throughput(m, stages, (1, 2))
    name, setting = "folded", f"S={stages} W={p} B={b} M={m}"
    return [
        Row(name, setting, "activations", "M", m, "<=", max(_held(ran))),
        Row(name, setting, "throughput", "M/S", m / stages, ">", rho),
        Row(name, setting, "throughput", "2M/(S+1)", least, "<=", rho),
    ]


if __name__ == "__main__":
    print(text())
