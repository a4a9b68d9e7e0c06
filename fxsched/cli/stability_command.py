"""The command about stale training: regions of stability on a quadratic."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..draw.curves import curves
from ..draw.tables import table
from .option_types import NUMBER, POSITION, file

if TYPE_CHECKING:
    from ..equality.stability import Stability

METHODS = ("sgd", "momentum", "nesterov", "stale_sgd", "pipemare")
TOP = 1.5  # the largest spectral radius that is drawn


def counts(text: str) -> tuple[int, ...]:
    """Numbers from 0 on with commas between."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise click.BadParameter(f"{text!r} is no list of numbers; give such as 0,1,4")
    return tuple(dict.fromkeys(map(int, parts)))


@click.command()
@click.option(
    "--method",
    type=click.Choice(METHODS),
    required=True,
    help="how the optimizer updates weights",
)
@click.option(
    "--staleness",
    type=counts,
    metavar="K,..",
    default="0,1,2,4",
    help="by how many updates gradients are late; for pipemare, by how many updates "
    "F's weights are late",
)
@click.option(
    "--beta",
    type=NUMBER,
    default=0.9,
    help="for momentum and nesterov: the momentum factor",
)
@click.option(
    "--backward",
    type=POSITION,
    default=0,
    help="for pipemare: by how many updates B's weights are late",
)
@click.option(
    "--sensitivity",
    type=NUMBER,
    default=1.0,
    help="for pipemare: how much a gradient changes with the difference between F's "
    "and B's weights, in units of lambda",
)
@click.option(
    "--correction",
    type=NUMBER,
    default=0.135,
    help="for pipemare: D of the discrepancy correction, from 0 to 1",
)
@click.option(
    "--uncorrected",
    is_flag=True,
    help="for pipemare: leave out the discrepancy correction",
)
@click.option(
    "--exponent",
    type=NUMBER,
    default=0.0,
    help="for pipemare: the learning rate is lr / staleness^exponent",
)
@click.option(
    "--upper", type=NUMBER, default=4.0, help="the largest lr * lambda to try"
)
@click.option(
    "--svg",
    type=file,
    metavar="FILE",
    help="write a picture of the curves to this SVG file",
)
def stability(
    method: str,
    staleness: tuple[int, ...],
    svg: Path | None,
    uncorrected: bool,
    **options: Any,
) -> None:
    """Print how large a learning rate stale gradients allow, on a quadratic.

    lr * lambda is the learning rate times the curvature. The table shows the value of
    lr * lambda up to which training is stable, and the value at which training
    converges fastest. Each update multiplies the error by the spectral radius.
    """
    from ..equality.stability import stability as analyse

    if uncorrected:
        options["correction"] = None
    records = [analyse(method, k, **options) for k in staleness]
    rows = [
        (r.staleness, _bound(r, options["upper"]), f"{r.best:.4g}", f"{r.rate:.4f}")
        for r in records
    ]
    click.echo(table("staleness|stable below|fastest at|spectral radius", rows, "r"))
    if svg is not None:
        svg.write_text(_picture(records), encoding="utf-8")


def _bound(record: Stability, upper: float) -> str:
    return f"all to {upper:g}" if record.bound is None else f"{record.bound:.4g}"


def _picture(records: list[Stability]) -> str:
    """A curve for each staleness; the axis ends soon after all have left the region."""
    ends = [record.bound or record.lr_lambda[-1] for record in records]
    end = min(1.25 * max(ends), records[0].lr_lambda[-1])
    named = {
        f"staleness {record.staleness}": [
            (x, y)
            for x, y in zip(record.lr_lambda, record.radius, strict=True)
            if x <= end
        ]
        for record in records
    }
    title = f"{records[0].method}: spectral radius of an update on a quadratic"
    return curves(named, title, ("lr * lambda", "spectral radius"), 1.0, TOP)
