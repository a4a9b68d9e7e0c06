"""Values of a step, as eager PyTorch and as a plan have them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from .departures import rounding

MARGIN = 8  # by which a plan's rounding may exceed that of eager PyTorch's runs


@dataclass(frozen=True)
class Difference:
    """One value, as eager PyTorch and as the plan have it.

    eager, planned: their largest elements; None where one has no such value.
    largest: the largest difference. allowed: what rounding may make of it.
    """

    name: str
    eager: float | None
    planned: float | None
    largest: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether the difference is no more than rounding."""
        return self.largest <= self.allowed  # NaN is no pass


def compare_values(
    wanted: Mapping[str, Tensor | None], actual: Mapping[str, Tensor | None]
) -> Iterator[Difference]:
    """Gradients are rounded as the largest of them are, to a thousandth."""
    largest = max(map(_size, _gradients(wanted)), default=0.0)
    for name in dict(wanted) | dict(actual):
        eager, planned = wanted.get(name), actual.get(name)
        if eager is None and planned is None:
            continue
        if eager is None or planned is None:
            gap = max(_size(eager), _size(planned))
            yield Difference(name, _shown(eager), _shown(planned), gap, 0.0)
            continue
        if eager.shape != planned.shape:
            yield Difference(name, _size(eager), _size(planned), float("inf"), 0.0)
            continue
        scale = _size(eager)
        if name.startswith("gradient"):
            scale = max(scale, largest / 1000)
        gap = _size(eager.double() - planned.double())
        allowed = rounding(eager) * max(scale, 1e-6)
        yield Difference(name, _shown(eager), _shown(planned), gap, allowed)


def allow_noise(
    differences: Iterable[Difference],
    eager: Mapping[str, Tensor | None],
    others: Iterable[Mapping[str, Tensor | None]],
) -> Iterator[Difference]:
    """Allows a gradient to differ as much as eager PyTorch's own does in `others`, runs
    with the last bits of the weights changed; at most, as much as the largest may."""
    largest = max(map(_size, _gradients(eager)), default=0.0)
    noise: dict[str, float] = {}
    for each in (each for other in others for each in compare_values(eager, other)):
        noise[each.name] = max(noise.get(each.name, 0.0), each.largest)
    for each in differences:
        value = eager.get(each.name)
        if (
            value is None
            or each.planned is None
            or not each.name.startswith("gradient")
        ):
            yield each
            continue
        allowed = min(MARGIN * noise[each.name], rounding(value) * largest)
        yield replace(each, allowed=max(each.allowed, allowed))


def _gradients(values: Mapping[str, Tensor | None]) -> Iterator[Tensor]:
    for name, value in values.items():
        if name.startswith("gradient") and value is not None:
            yield value


def _size(value: Tensor | None) -> float:
    """The largest element, without its sign."""
    if value is None or not value.numel():
        return 0.0
    return float(value.double().abs().max())


def _shown(value: Tensor | None) -> float | None:
    """A scalar, or the largest element."""
    if value is None:
        return None
    return float(value) if value.numel() == 1 else _size(value)


def table_row(each: Difference) -> tuple[str, ...]:
    """The cells of one value."""

    def number(value: float | None) -> str:
        return "none" if value is None else f"{value:.4g}"

    return (
        each.name,
        number(each.eager),
        number(each.planned),
        f"{each.largest:.1e}",
        f"{each.allowed:.1e}",
        "" if each.passed else "FAIL",
    )
