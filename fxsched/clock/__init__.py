"""Runs jobs on a virtual clock: stages, links, and what workers hold and do.

Imports: jobs.
"""
