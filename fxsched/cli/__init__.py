"""The commands.

Imports: backend, clock, draw, dry_run, equality, jobs, models, options, params,
partition, plans, progress, runtime, schedules, simulator, transport, tuner.
"""
