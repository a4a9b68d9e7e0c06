"""The passes: one function a file, `(gm, request) -> gm` or `(step, request) -> step`.

For your own passes: stage_graphs and replaces.

Imports: accounts, autodiff, checker, clock, ir, jobs, partition, placement.
"""

from .users import replaces, stage_graphs

__all__ = ["replaces", "stage_graphs"]
