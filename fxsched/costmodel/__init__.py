"""Seconds and bytes of operations, estimated or measured.

Imports: clock, ir, jobs.
"""
