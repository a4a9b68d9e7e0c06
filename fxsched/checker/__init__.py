"""Proves programs sound, without what made them.

Imports: clock, ir, jobs.
"""
