"""What changes PyTorch in the process: a file for each function, and why it must.

Imports: ir, jobs.
"""
