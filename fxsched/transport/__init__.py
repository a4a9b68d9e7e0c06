"""Moves values between ranks; alone knows torch.distributed.

Imports: ir, jobs.
"""
