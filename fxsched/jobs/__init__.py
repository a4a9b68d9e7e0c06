"""The words of fxsched: jobs, where they run, in which order, and a schedule.

Imports: nothing.
"""
