"""Parameters and buffers: which rank keeps what, what is made later, all of it whole.

Imports: ir, jobs, torch_compat, transport.
"""
