"""Parallel training as one placement and one priority function.

`torch.compile(model, backend=fxsched.backend(schedule))`; see README.md.
"""

from . import schedules
from .backend import Backend, backend, explain, plan, profile
from .boundary import stage_boundary
from .check import CheckError
from .jobs import Direction, Job, Placement, PlanError, Schedule
from .measure import Profile
from .pipeline import Plan
from .simulate import Link, Simulation, simulate

__all__ = [
    "Backend",
    "CheckError",
    "Direction",
    "Job",
    "Link",
    "Placement",
    "Plan",
    "PlanError",
    "Profile",
    "Schedule",
    "Simulation",
    "backend",
    "explain",
    "plan",
    "profile",
    "schedules",
    "simulate",
    "stage_boundary",
]
