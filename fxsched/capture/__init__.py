"""A model to the fx graph of one microbatch; alone knows Dynamo and torch.export.

Imports: ir, jobs, partition, placement, torch_compat.
"""
