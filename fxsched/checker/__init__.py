"""Proves programs sound, without what made them.

Imports: ir, jobs.
"""
