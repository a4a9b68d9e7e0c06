"""How fast stale training converges, and when it does not, on a quadratic.

Imports: jobs.
"""
