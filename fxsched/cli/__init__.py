"""The commands.

Imports: backend, clock, convergence, draw, dry_run, equality, flight, jobs, models,
plans, schedules, simulator, state, transport, tuner.
"""
