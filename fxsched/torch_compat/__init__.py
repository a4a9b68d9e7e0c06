"""What fxsched changes in PyTorch, in this process: a file for each function.

Imports: ir, jobs.
"""
