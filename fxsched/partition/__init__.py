"""What operations cost, and where to cut a model into stages.

Imports: accounts, clock, ir, jobs, schedules.
"""
