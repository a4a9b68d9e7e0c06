"""The passes: each file one public function `verb_noun(gm, request) -> gm`.

Imports: autodiff, clock, costmodel, ir, jobs, partition.
"""
