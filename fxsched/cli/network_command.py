"""The command that measures the network between the ranks of torchrun."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click

from ..clock.network import Network, Rate
from ..draw import tables
from ..jobs.job import PlanError
from ..jobs.user_values import counted
from .option_types import file_of

if TYPE_CHECKING:  # it needs torch, which is imported where it is used
    from ..transport.processes import Processes

ODD = 3.0  # times slower than the median


@click.command()
@click.argument("path", metavar="FILE", type=file_of(".json"))
def network(path: Path) -> None:
    """Measure the network between the hosts of torchrun, and write it to FILE.

    Start the command on each host, with the same torchrun arguments as your training:
    torchrun .. -m fxsched network net.json. Rank 0 writes the file.
    fxsched.backend(network=) and the option --network of other commands read it.
    """
    if "RANK" not in os.environ:
        raise PlanError(
            "fxsched network measures between ranks: start it on each host as "
            "torchrun --nproc-per-node 2 .. -m fxsched network net.json"
        )
    from ..transport.processes import Processes, leave

    processes = Processes(int(os.environ["WORLD_SIZE"]), what="fxsched network")
    made, rates = measured_network(processes)
    if processes.rank == 0:
        made.save(path)
        click.echo(_table(made, rates))
        click.echo(f"wrote {path}")
    processes.close()
    leave()


def measured_network(
    processes: Processes,
) -> tuple[Network, dict[tuple[int, int], Rate]]:
    """The network between ranks, and what was measured between pairs of them.

    Every rank calls it, and gets it.
    """
    from ..transport.speeds import measure

    found = measure(processes)
    rates = {pair: Rate(*speed) for pair, speed in found.items()}
    return _network(processes.hosts, rates), rates


def _network(
    hosts: Sequence[Sequence[int]], rates: Mapping[tuple[int, int], Rate]
) -> Network:
    """With the medians of all pairs."""
    if not rates:
        raise PlanError("one rank has no network; start two or more")
    near = [rate for pair, rate in rates.items() if _host(hosts, pair)]
    far = [rate for pair, rate in rates.items() if not _host(hosts, pair)]
    return Network(hosts, _median(near or far), _median(far or near))


def _host(hosts: Sequence[Sequence[int]], pair: tuple[int, int]) -> bool:
    return any({*pair} <= {*host} for host in hosts)


def _median(rates: list[Rate]) -> Rate:
    fields = ("bandwidth", "latency", "message", "duplex")
    return Rate(*(median(getattr(rate, name) for rate in rates) for name in fields))


def _table(made: Network, rates: Mapping[tuple[int, int], Rate]) -> str:
    """The medians, then a line for each pair that is much slower."""
    rows, odd = [], []
    for name, usual in (
        ("inside a host", made.inside),
        ("between hosts", made.between),
    ):
        inside = usual is made.inside
        pairs = {p: r for p, r in rates.items() if _host(made.hosts, p) == inside}
        if not pairs:
            continue
        rows.append((name, f"{len(pairs)}", *_cells(usual)))
        for (a, b), rate in pairs.items():
            times = max(
                usual.bandwidth / rate.bandwidth,
                (rate.latency + rate.message)
                / max(usual.latency + usual.message, 1e-6),
            )
            if times > ODD:
                odd.append(
                    f"between ranks {a} and {b} messages are {times:.1f} times slower "
                    "than between most: check their cable, switch port and interface"
                )
    headers = "|pairs|bandwidth|latency us|a message us|both ways"
    hosts, ranks = len(made.hosts), sum(map(len, made.hosts))
    title = f"{counted(hosts, 'host')}, {counted(ranks, 'rank')}"
    return "\n\n".join((title, tables.table(headers, rows, "lr"), *odd))


def _cells(rate: Rate) -> tuple[str, ...]:
    return (
        f"{tables.byte_text(rate.bandwidth)}/s",
        f"{rate.latency * 1e6:.3g}",
        f"{rate.message * 1e6:.3g}",
        f"{rate.duplex:.2f} x",
    )
