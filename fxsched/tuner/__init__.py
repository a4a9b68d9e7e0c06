"""Looks for schedules.

Imports: backend, clock, draw, jobs, plans, schedules, simulator.
"""
