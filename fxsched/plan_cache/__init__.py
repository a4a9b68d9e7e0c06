"""Plans on disk, found again by what they were made of.

Imports: ir, jobs, progress.
"""
