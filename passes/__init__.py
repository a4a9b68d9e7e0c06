"""The passes: each file one public function `verb_noun(gm, request) -> gm`.

For passes of the user's: encode_transfers and stage_graphs.

Imports: autodiff, clock, costmodel, ir, jobs, partition.
"""

from .users import encode_transfers, stage_graphs

__all__ = ["encode_transfers", "stage_graphs"]
