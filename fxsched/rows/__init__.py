"""Which operations keep rows of a batch apart, and what a loss over parts means.

Imports: ir, jobs.
"""
