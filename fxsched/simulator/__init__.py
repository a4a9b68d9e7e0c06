"""A schedule, or a measured step, to a timeline and figures.

Imports: clock, draw, jobs.
"""
