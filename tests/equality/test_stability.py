"""Stability of stale training on a quadratic, beside its loops run step by step."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import fxsched
from fxsched import PlanError
from fxsched.cli import main as cli


def growth(method: str, k: int, a: float, **options: float) -> float:
    """The factor per update of the loop itself, on the loss w^2 / 2 with lr = a."""
    beta, tail = options.get("beta", 0.0), int(options.get("backward", 0))
    s, decay = options.get("sensitivity", 0.0), options.get("correction")
    gamma = decay ** (1 / (k - tail)) if decay is not None else 1.0
    lr = a / max(k, 1) ** options.get("exponent", 0.0)
    past, velocity, size, half = [1.0] * (k + 2), 0.0, 0.0, 0.0
    updates = 3000
    for t in range(updates):
        if method == "pipemare":
            late = past[-1 - tail] - (k - tail) * velocity
            step = -lr * ((1 + s) * past[-1 - k] - s * late)
            velocity = gamma * velocity + (1 - gamma) * step
        else:
            gradient = past[-1 - k]
            velocity = beta * velocity + gradient
            nesterov = method == "nesterov"
            step = -lr * (gradient + beta * velocity if nesterov else velocity)
        past = [*past[1:], past[-1] + step]
        norm = math.hypot(velocity, *past)  # numbers are kept near 1
        past, velocity = [w / norm for w in past], velocity / norm
        size += math.log(norm)
        half = size if t == updates // 2 - 1 else half
    return math.exp((size - half) / (updates - updates // 2))


CASES: list[tuple[str, int, dict[str, float]]] = [
    ("sgd", 0, {}),
    ("stale_sgd", 1, {}),
    ("stale_sgd", 4, {}),
    ("momentum", 0, {"beta": 0.9}),
    ("momentum", 3, {"beta": 0.5}),
    ("nesterov", 0, {"beta": 0.9}),
    ("nesterov", 2, {"beta": 0.7}),
    ("pipemare", 4, {"sensitivity": 3.0, "correction": 0.135}),
    ("pipemare", 5, {"sensitivity": 1.0, "correction": 0.3, "backward": 2}),
    ("pipemare", 4, {"sensitivity": 0.5, "correction": 0.135, "exponent": 1.0}),
]


@pytest.mark.parametrize(("method", "k", "options"), CASES)
def test_the_radius_is_the_growth_of_the_loop(
    method: str, k: int, options: dict[str, float]
) -> None:
    points = [0.03, 0.2, 0.7, 1.3, 2.5]
    record = fxsched.stability(method, k, lr_lambda=points, **options)  # type: ignore[arg-type]
    seen = [growth(method, k, a, **options) for a in points]
    assert record.radius == pytest.approx(seen, rel=3e-3)


def test_stale_sgd_has_its_published_radii() -> None:
    record = fxsched.stability("stale_sgd", 1, lr_lambda=[0.9, 1.1])
    assert [round(radius, 3) for radius in record.radius] == [0.949, 1.049]


@pytest.mark.parametrize("k", [0, 1, 2, 5, 20])
def test_stale_sgd_is_stable_up_to_its_closed_form(k: int) -> None:
    record = fxsched.stability("stale_sgd", k)
    assert record.bound == pytest.approx(2 * math.sin(math.pi / (4 * k + 2)), abs=1e-8)
    # two roots meet where a = k^k / (k + 1)^(k + 1), at k / (k + 1)
    assert record.best == pytest.approx(k**k / (k + 1) ** (k + 1), rel=1e-4)
    assert record.rate == pytest.approx(k / (k + 1), abs=1e-5)


def test_momentum_is_stable_up_to_its_closed_form() -> None:
    momentum = fxsched.stability("momentum", 0, beta=0.9)
    nesterov = fxsched.stability("nesterov", 0, beta=0.9)
    assert momentum.bound == pytest.approx(2 * 1.9, abs=1e-8)
    assert momentum.best == pytest.approx((1 - math.sqrt(0.9)) ** 2, rel=1e-4)
    assert momentum.rate == pytest.approx(math.sqrt(0.9), abs=1e-6)
    assert nesterov.bound == pytest.approx(2 * 1.9 / 2.8, abs=1e-8)


def test_pipemare_without_sensitivity_is_stale_sgd() -> None:
    pipemare = fxsched.stability("pipemare", 3, sensitivity=0.0)
    assert pipemare.bound == pytest.approx(
        fxsched.stability("stale_sgd", 3).bound, abs=1e-8
    )


@pytest.mark.parametrize(
    ("correction", "order"), [(None, 2), (0.3, 3), ((1 - 2 / 10) ** 9, 4)]
)
def test_the_correction_hides_the_discrepancy(
    correction: float | None, order: int
) -> None:
    """Sensitivity moves the slow root by lr^2, by lr^3 where B is corrected, by lr^4
    where gamma = 1 - 2 / (k + 1), so that D = gamma^k goes to e^-2 as k grows."""
    lr = 2e-3
    slow, alike = (
        fxsched.stability(
            "pipemare", 9, sensitivity=s, correction=correction, lr_lambda=[lr, 2 * lr]
        ).radius
        for s in (1.0, 0.0)
    )
    once, twice = (abs(a - b) for a, b in zip(slow, alike, strict=True))
    assert math.log2(twice / once) == pytest.approx(order, abs=0.2)


def test_the_rescheduled_rate_is_divided() -> None:
    late, early = (
        fxsched.stability("pipemare", 3, exponent=p).bound or 0.0 for p in (0.0, 1.0)
    )
    assert early == pytest.approx(3 * late, rel=1e-6)


def test_a_range_that_ends_in_the_region_has_no_bound() -> None:
    assert fxsched.stability("sgd", upper=1.5).bound is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "adam"}, "method 'adam': give one of sgd"),
        ({"method": "sgd", "staleness": -1}, "staleness -1"),
        ({"method": "momentum", "beta": 1.0}, "beta is 1; give 0 or more"),
        ({"method": "pipemare", "backward": 2}, "backward is 2, but"),
        ({"method": "pipemare", "correction": 1.5}, "correction is 1.5"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        fxsched.stability(**options)  # type: ignore[arg-type]


def test_the_command_prints_a_table_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "stability.svg"
    line = ["stability", "--method", "stale_sgd", "--staleness", "0,1"]
    cli.main([*line, "--svg", str(picture)])
    rows = [row.split() for row in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [["0", "2", "1", "0.0000"], ["1", "1", "0.25", "0.5000"]]
    text = picture.read_text()
    assert "staleness 1" in text and "stroke-dasharray" in text
