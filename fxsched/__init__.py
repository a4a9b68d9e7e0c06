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
    from . import passes as passes
    from . import schedules as schedules
    from .backend import Backend as Backend
    from .backend import backend as backend
    from .checker.summary import CheckError as CheckError
    from .checkpoint.load import load as load
    from .checkpoint.save import save as save
    from .checkpoint.saving import Saving as Saving
    from .checkpoint.weights import load_weights as load_weights
    from .checkpoint.weights import save_weights as save_weights
    from .clock.network import Link as Link
    from .clock.network import Network as Network
    from .clock.network import Rate as Rate
    from .clock.timeline import Event as Event
    from .compiled import Compiled as Compiled
    from .compiled import compile as compile
    from .draw.chrome import write_trace as write_trace
    from .draw.diagram import Diagram as Diagram
    from .dry_run import explain as explain
    from .dry_run import plan as plan
    from .equality.replay import replay as replay
    from .equality.stability import Stability as Stability
    from .equality.stability import stability as stability
    from .equality.verify import Verification as Verification
    from .equality.verify import verify as verify
    from .ir import ops as ops
    from .ir.boundary import stage_boundary as stage_boundary
    from .jobs.job import Direction as Direction
    from .jobs.job import Job as Job
    from .jobs.job import Placement as Placement
    from .jobs.job import PlanError as PlanError
    from .jobs.schedule import Schedule as Schedule
    from .params.clip import clip_grad_norm_ as clip_grad_norm_
    from .params.cut_weights import local_parts as local_parts
    from .params.deferred import deferred as deferred
    from .params.deferred import materialize as materialize
    from .params.full_state import (
        full_optimizer_state_dict as full_optimizer_state_dict,
    )
    from .params.full_state import full_state_dict as full_state_dict
    from .params.full_state import (
        load_full_optimizer_state_dict as load_full_optimizer_state_dict,
    )
    from .params.full_state import load_full_state_dict as load_full_state_dict
    from .params.norms import gradient_norm as gradient_norm
    from .params.norms import gradient_norms as gradient_norms
    from .params.norms import parameter_norms as parameter_norms
    from .params.parameter_sums import parameter_sum as parameter_sum
    from .params.stream import stream_state_dict as stream_state_dict
    from .partition.measure import Profile as Profile
    from .placement.placements import keeps_rows as keeps_rows
    from .placement.placements import placements as placements
    from .placement.row_warnings import RowsWarning as RowsWarning
    from .plans.plan import Plan as Plan
    from .profiling import profile as profile
    from .runtime.local_rows import LocalSampler as LocalSampler
    from .schedules.saved import load_schedule as load_schedule
    from .simulator.simulate import Simulation as Simulation
    from .simulator.simulate import simulate as simulate
    from .tuner.recommend import Recommendation as Recommendation
    from .tuner.recommend import recommend as recommend
    from .tuner.search import search as search

__version__ = "0.1.0"

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
    "dry_run": ("explain", "plan"),
    "equality.replay": ("replay",),
    "equality.verify": ("Verification", "verify"),
    "ir.boundary": ("stage_boundary",),
    "ir.ops": ("ops",),
    "jobs.job": ("Direction", "Job", "Placement", "PlanError"),
    "jobs.schedule": ("Schedule",),
    "passes": ("passes",),
    "plans.plan": ("Plan",),
    "profiling": ("profile",),
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
    "tuner.recommend": ("Recommendation", "recommend"),
    "tuner.search": ("search",),
}
HOMES = {name: module for module, names in MODULES.items() for name in names}


if not TYPE_CHECKING:
    __all__ = sorted(HOMES)

    def __getattr__(name: str) -> Any:
        if name not in HOMES:
            text = f"module {__name__!r} has no attribute {name!r}"
            # by these two Python adds which name is near
            raise AttributeError(text, name=name, obj=sys.modules[__name__])
        home = import_module(f".{HOMES[name]}", __name__)
        value = globals()[name] = getattr(home, name, home)  # or that module
        return value


def __dir__() -> list[str]:
    return sorted([*HOMES, "__version__"])


class _Package(ModuleType):
    """fxsched.backend is the function, also after its module has been imported, which
    the import system would put in its place."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name == "backend" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
print_once()
