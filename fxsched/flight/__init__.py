"""The record of a failed step, one file a rank, and whom it blames.

Imports: draw, jobs.
"""
