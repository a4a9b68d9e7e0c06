"""The commands.

Imports: backend, clock, draw, dry_run, jobs, models, schedules, simulator, state,
transport, tuner.
"""
