"""The commands.

Imports: backend, clock, convergence, draw, dry_run, equality, jobs, models, plans,
schedules, simulator, state, transport, tuner.
"""
