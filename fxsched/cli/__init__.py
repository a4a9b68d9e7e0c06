"""The commands.

Imports: backend, clock, convergence, draw, dry_run, equality, flight, jobs, models,
params, plans, schedules, simulator, transport, tuner.
"""
