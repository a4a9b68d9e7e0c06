"""A plan: the programs of all ranks, and what they were made from.

Imports: accounts, checker, clock, draw, ir, jobs, partition, simulator.
"""
