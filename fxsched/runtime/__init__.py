"""Runs the programs of a plan, call by call.

Imports: capture, checker, clock, codegen, draw, flight, ir, jobs, params, plans,
rows, transport.
"""
