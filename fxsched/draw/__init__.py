"""Tables and pictures.

Imports: clock, ir, jobs.
"""
