"""Building a model without memory: its values are made where they are kept.

Imports: ir, jobs, state.
"""
