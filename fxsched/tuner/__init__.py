"""Looks for schedules.

Imports: accounts, clock, draw, dry_run, jobs, plans, progress,
schedules, simulator.
"""
