"""What passes read and write: graphs of a microbatch, their operations, a step.

Imports: clock, jobs.
"""
