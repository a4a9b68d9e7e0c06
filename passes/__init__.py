"""The passes: one function a file, `(gm, request) -> gm` or `(step, request) -> step`.

For passes of the user's: encode_transfers and stage_graphs.

Imports: autodiff, checker, clock, costmodel, ir, jobs, partition, rows, sharding.
"""

from .users import encode_transfers, stage_graphs

__all__ = ["encode_transfers", "stage_graphs"]
