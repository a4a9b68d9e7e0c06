"""Looks for schedules.

Imports: accounts, clock, draw, dry_run, jobs, plans, schedules, simulator.
"""
