"""What operations do with rows of a batch and with parts of weights, and what follows.

Imports: ir, jobs, partition.
"""
