"""A model to the fx graph of one microbatch; alone knows Dynamo and torch.export.

Imports: costmodel, ir, jobs, rows, torch_compat.
"""
