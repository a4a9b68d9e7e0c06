"""Where to cut a model into stages.

Imports: clock, jobs.
"""
