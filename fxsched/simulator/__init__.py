"""A schedule, or a measured step, to a timeline and figures.

Imports: accounts, clock, draw, ir, jobs.
"""
