"""Parallel training as one placement and one priority function.

`torch.compile(model, backend=fxsched.backend(schedule))`; see README.md.
"""

from . import schedules
from .backend import Backend, backend, plan
from .check import CheckError
from .jobs import Direction, Job, Placement, PlanError, Schedule
from .pipeline import Plan

__all__ = [
    "Backend",
    "CheckError",
    "Direction",
    "Job",
    "Placement",
    "Plan",
    "PlanError",
    "Schedule",
    "backend",
    "plan",
    "schedules",
]
