"""A model's training state on disk: saved by ranks, loaded under any schedule.

Imports: backend, jobs, params, transport.
"""
