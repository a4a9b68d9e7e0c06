"""Parallel training as one placement and one priority function.

`torch.compile(model, backend=fxsched.backend(schedule))`; see README.md.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .uncaught import print_once

if TYPE_CHECKING:
    from . import passes, schedules
    from .backend import Backend, backend
    from .checker.summary import CheckError
    from .checkpoint.load import load
    from .checkpoint.save import save
    from .checkpoint.saving import Saving
    from .checkpoint.weights import load_weights, save_weights
    from .clock.network import Link, Network, Rate
    from .clock.timeline import Event
    from .compiled import Compiled, compile
    from .draw.chrome import write_trace
    from .draw.diagram import Diagram
    from .dry_run import explain, plan, profile
    from .equality.replay import replay
    from .equality.stability import Stability, stability
    from .equality.verify import Verification, verify
    from .ir import ops
    from .ir.boundary import stage_boundary
    from .jobs.job import Direction, Job, Placement, PlanError
    from .jobs.schedule import Schedule
    from .params.clip import clip_grad_norm_
    from .params.cut_weights import local_parts
    from .params.deferred import deferred, materialize
    from .params.full_state import (
        full_optimizer_state_dict,
        full_state_dict,
        load_full_optimizer_state_dict,
        load_full_state_dict,
    )
    from .params.norms import gradient_norm, gradient_norms, parameter_norms
    from .params.parameter_sums import parameter_sum
    from .params.stream import stream_state_dict
    from .partition.measure import Profile
    from .placement.placements import keeps_rows, placements
    from .placement.row_warnings import RowsWarning
    from .plans.plan import Plan
    from .runtime.local_rows import LocalSampler
    from .schedules.saved import load_schedule
    from .simulator.simulate import Simulation, simulate
    from .tuner.search import search

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "CheckError",
    "Compiled",
    "Diagram",
    "Direction",
    "Event",
    "Job",
    "Link",
    "LocalSampler",
    "Network",
    "Placement",
    "Plan",
    "PlanError",
    "Profile",
    "Rate",
    "RowsWarning",
    "Saving",
    "Schedule",
    "Simulation",
    "Stability",
    "Verification",
    "backend",
    "clip_grad_norm_",
    "compile",
    "deferred",
    "explain",
    "full_optimizer_state_dict",
    "full_state_dict",
    "gradient_norm",
    "gradient_norms",
    "keeps_rows",
    "load",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "load_schedule",
    "load_weights",
    "local_parts",
    "materialize",
    "ops",
    "parameter_norms",
    "parameter_sum",
    "passes",
    "placements",
    "plan",
    "profile",
    "replay",
    "save",
    "save_weights",
    "schedules",
    "search",
    "simulate",
    "stability",
    "stage_boundary",
    "stream_state_dict",
    "verify",
    "write_trace",
]

# The names of each module, imported when one is first asked for: PyTorch, which most of
# them need, takes seconds to import.
MODULES = {
    "backend": ("Backend", "backend"),
    "params.deferred": ("deferred", "materialize"),
    "checker.summary": ("CheckError",),
    "checkpoint.load": ("load",),
    "checkpoint.save": ("save",),
    "checkpoint.saving": ("Saving",),
    "checkpoint.weights": ("load_weights", "save_weights"),
    "clock.network": ("Link", "Network", "Rate"),
    "clock.timeline": ("Event",),
    "compiled": ("Compiled", "compile"),
    "equality.stability": ("Stability", "stability"),
    "partition.measure": ("Profile",),
    "draw.chrome": ("write_trace",),
    "draw.diagram": ("Diagram",),
    "dry_run": ("explain", "plan", "profile"),
    "equality.replay": ("replay",),
    "equality.verify": ("Verification", "verify"),
    "ir.boundary": ("stage_boundary",),
    "ir.ops": ("ops",),
    "jobs.job": ("Direction", "Job", "Placement", "PlanError"),
    "jobs.schedule": ("Schedule",),
    "passes": ("passes",),
    "plans.plan": ("Plan",),
    "placement.placements": ("keeps_rows", "placements"),
    "placement.row_warnings": ("RowsWarning",),
    "runtime.local_rows": ("LocalSampler",),
    "schedules": ("schedules",),
    "schedules.saved": ("load_schedule",),
    "simulator.simulate": ("Simulation", "simulate"),
    "params.clip": ("clip_grad_norm_",),
    "params.full_state": (
        "full_optimizer_state_dict",
        "full_state_dict",
        "load_full_optimizer_state_dict",
        "load_full_state_dict",
    ),
    "params.cut_weights": ("local_parts",),
    "params.norms": ("gradient_norm", "gradient_norms", "parameter_norms"),
    "params.parameter_sums": ("parameter_sum",),
    "params.stream": ("stream_state_dict",),
    "tuner.search": ("search",),
}
HOMES = {name: module for module, names in MODULES.items() for name in names}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in HOMES:
            text = f"module {__name__!r} has no attribute {name!r}"
            # by these two Python adds which name is near
            raise AttributeError(text, name=name, obj=sys.modules[__name__])
        home = import_module(f".{HOMES[name]}", __name__)
        value = globals()[name] = getattr(home, name, home)  # or that module
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


class _Package(ModuleType):
    """fxsched.backend is the function, also after its module has been imported, which
    the import system would put in its place."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name == "backend" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
print_once()
