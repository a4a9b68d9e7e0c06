"""A plan beside eager PyTorch on the whole batch.

Imports: backend, capture, draw, ir, jobs, options, planning, plans, rows, runtime.
"""
