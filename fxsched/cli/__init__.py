"""The commands.

Imports: backend, clock, draw, jobs, models, schedules, simulator, state, transport,
tuner.
"""
