"""A plan beside eager PyTorch, and what stale training comes to on a quadratic.

Imports: backend, capture, draw, ir, jobs, options, placement, planning, plans,
progress, runtime.
"""
