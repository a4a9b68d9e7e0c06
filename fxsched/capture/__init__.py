"""A model to the fx graph of one microbatch; alone knows Dynamo.

Imports: costmodel, ir, jobs, rows.
"""
