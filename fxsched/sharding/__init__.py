"""Which weights are cut into shards, and what each operation does with its parts.

Imports: costmodel, ir, jobs, rows.
"""
