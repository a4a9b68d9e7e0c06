"""Parallel training as one placement and one priority function.

`torch.compile(model, backend=fxsched.backend(schedule))`; see README.md.
"""

from . import passes, schedules
from .backend import Backend, backend
from .checker.check_messages import CheckError
from .clock.event_loop import Event
from .clock.network import Link
from .costmodel.measure import Profile
from .draw.chrome import write_trace
from .draw.diagram import Diagram
from .dry_run import explain, plan, profile
from .equality.verify import Verification, verify
from .ir import ops
from .ir.boundary import stage_boundary
from .jobs import Direction, Job, Placement, PlanError, Schedule
from .plans.plan import Plan
from .rows.row_warnings import RowsWarning
from .runtime.local_rows import LocalSampler
from .simulator.simulate import Simulation, simulate
from .state.clip import clip_grad_norm_
from .state.full_state import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)
from .tuner.search import search

__version__ = "0.1.0"

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
    "ops",
    "passes",
    "plan",
    "profile",
    "schedules",
    "search",
    "simulate",
    "stage_boundary",
    "verify",
    "write_trace",
]


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
