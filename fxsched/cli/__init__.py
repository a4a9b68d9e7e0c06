"""The commands.

Imports: backend, clock, convergence, draw, dry_run, jobs, models, schedules, simulator,
state, transport, tuner.
"""
