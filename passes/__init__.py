"""The passes: one function a file, `(gm, request) -> gm` or `(step, request) -> step`.

For your own passes: encode_transfers, stage_graphs and replaces.

Imports: autodiff, checker, clock, ir, jobs, partition, placement.
"""

from .users import encode_transfers, replaces, stage_graphs

__all__ = ["encode_transfers", "replaces", "stage_graphs"]
