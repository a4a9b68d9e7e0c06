"""A program to a Python function.

Imports: ir, jobs, transport.
"""
