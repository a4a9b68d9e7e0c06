"""Which rank keeps what of a model and its optimizer, and all of it whole again.

Imports: ir, jobs, transport.
"""
