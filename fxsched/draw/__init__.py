"""Tables and pictures.

Imports: accounts, clock, ir, jobs.
"""
