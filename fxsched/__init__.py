"""Parallel training as one placement and one priority function.

`torch.compile(model, backend=fxsched.backend(schedule))`; see README.md.
"""

from . import schedules
from .backend import Backend, backend, explain, plan, profile
from .boundary import stage_boundary
from .check import CheckError
from .checkpoint import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)
from .chrome import write_trace
from .clip import clip_grad_norm_
from .complaints import RowsWarning
from .diagram import Diagram
from .eventloop import Event
from .jobs import Direction, Job, Placement, PlanError, Schedule
from .links import Link
from .local import LocalSampler
from .measure import Profile
from .pipeline import Plan
from .search import search
from .simulate import Simulation, simulate
from .verify import Verification, verify

__all__ = [
    "Backend",
    "CheckError",
    "Diagram",
    "Direction",
    "Event",
    "Job",
    "Link",
    "LocalSampler",
    "Placement",
    "Plan",
    "PlanError",
    "Profile",
    "RowsWarning",
    "Schedule",
    "Simulation",
    "Verification",
    "backend",
    "clip_grad_norm_",
    "explain",
    "full_optimizer_state_dict",
    "full_state_dict",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "plan",
    "profile",
    "schedules",
    "search",
    "simulate",
    "stage_boundary",
    "verify",
    "write_trace",
]
