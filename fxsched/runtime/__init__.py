"""Runs the programs of a plan, call by call, and keeps a record of those that fail.

Imports: capture, checker, clock, draw, ir, jobs, params, placement, plans, transport.
"""
