"""Looks for schedules.

Imports: clock, draw, dry_run, jobs, plans, schedules, simulator.
"""
