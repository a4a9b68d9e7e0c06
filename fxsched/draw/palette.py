"""From times to ticks and from jobs to colours, for everything that draws them."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .timeline_arrays import Array

# Lightness and chroma (OKLCH) of F, B, W and U: they differ in grey too, and labels on
# them have a contrast of 4.5 (WCAG 2.2, 1.4.3).
LIGHTNESS = np.array([0.87, 0.53, 0.73, 0.36])
CHROMA = np.array([0.075, 0.145, 0.045, 0.05])
# Hues of the first and the last microbatch.
HUES = (250.0, 585.0)
# Of so many microbatches odd ones are darker, as hues of neighbours are much alike. Of
# more, few are seen apart, and stripes would only make patterns of their own.
STRIPED = range(10, 200)


class Clock(NamedTuple):
    """How times are written: multiplied by `factor`, in `unit`."""

    factor: float
    unit: str

    def text(self, time: float) -> str:
        """A time with its unit."""
        return f"{time * self.factor:.4g} {self.unit}".rstrip()

    def cell(self, time: float) -> str:
        """A time in a column: measured and predicted ones all have four digits."""
        digits = "#.4g" if self.unit else ".4g"
        return f"{time * self.factor:{digits}}".rstrip(".")


def clock(span: float, unit: str) -> Clock:
    """Seconds are written as s, ms, µs or ns, whichever suits a step of `span`."""
    if unit != "s" or span <= 0:
        return Clock(1.0, unit)
    power = min(max(-math.floor(math.log10(span) / 3), 0), 3)
    return Clock(1e3**power, ("s", "ms", "µs", "ns")[power])


def ticks(span: float, most: float) -> list[float]:
    """Round numbers from 0 to `span`, at most about so many."""
    if span <= 0 or not math.isfinite(span):
        return [0.0]
    least = span / max(most, 1)
    power = 10.0 ** math.floor(math.log10(least))
    step = next(k * power for k in (1, 2, 5, 10) if k * power >= least * (1 - 1e-9))
    return [i * step for i in range(int(span / step * (1 + 1e-9)) + 1)]


def palette(microbatches: int, joint: bool = False) -> Array:
    """Colours as (microbatch, direction, RGB), 0 to 255.

    joint: a row more, in grey, for jobs on the rows of all microbatches.

    Hues go round from the first microbatch to the last, so that where many share a
    pixel their mean is the hue of those in between.
    """
    b = np.arange(max(microbatches, 1))
    first, last = HUES
    hue = first + (last - first) * b / len(b)
    darker = 0.045 * (b % 2) * (len(b) in STRIPED)
    lightness = LIGHTNESS[None, :] - darker[:, None]
    colours = _rgb(lightness, CHROMA[None, :], np.radians(hue)[:, None])
    grey = _rgb(LIGHTNESS[None, :], np.zeros((1, 1)), np.zeros((1, 1)))
    return np.concatenate((colours, grey)) if joint else colours


def _rgb(lightness: Array, chroma: Array, hue: Array) -> Array:
    """sRGB of OKLCH (Ottosson 2020, bottosson.github.io/posts/oklab)."""
    a, b = chroma * np.cos(hue), chroma * np.sin(hue)
    cone = np.stack(
        (
            lightness + 0.3963377774 * a + 0.2158037573 * b,
            lightness - 0.1055613458 * a - 0.0638541728 * b,
            lightness - 0.0894841775 * a - 1.2914855480 * b,
        ),
        -1,
    )
    linear = cone**3 @ np.array(
        [
            [4.0767416621, -1.2684380046, -0.0041960863],
            [-3.3077115913, 2.6097574011, -0.7034186147],
            [0.2309699292, -0.3413193965, 1.7076147010],
        ]
    )
    linear = np.clip(linear, 0, 1)
    curve = np.where(
        linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055
    )
    colours: Array = np.rint(255 * curve).astype(int)
    return colours


def hexadecimal(rgb: Array) -> str:
    """A colour as SVG and HTML write it, from parts of 0 to 255."""
    return "#{:02x}{:02x}{:02x}".format(*(int(part) for part in rgb))
