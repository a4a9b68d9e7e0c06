"""Where to cut a model into stages.

Imports: accounts, clock, jobs.
"""
