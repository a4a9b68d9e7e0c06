"""Lines of a model that torch.export can't trace either."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence

import torch

from ..jobs.job import PlanError

LIBRARY = os.path.dirname(os.__file__)
FOREIGN = (os.path.dirname(torch.__file__), os.path.dirname(__file__))
VALUES = (
    "it decides by values of a tensor, which only a run has: write it with "
    "torch.where or a mask, or decide outside of the model and pass a Python value"
)
HINTS = {"DataDependent": VALUES, "data-dependent": VALUES, "unbacked": VALUES}


def not_exported(error: Exception) -> PlanError:
    """The error for a line of the model that can't be traced either."""
    where = own_line(traceback.extract_tb(error.__traceback__))
    why = f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]
    what = next(
        (hint for word, hint in HINTS.items() if word in f"{why} {error}"),
        "write that line with torch operations, or move it out of the model",
    )
    return PlanError(
        f"the model can't be traced; torch.export stops at\n  {where}\n  ({why})\n"
        f"{what}"
    )


def own_line(frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost of frames that is of the user's code, as text."""
    own = [each for each in frames if not foreign(each.filename)]
    return "".join(traceback.format_list((own or list(frames))[-1:])).strip()


def foreign(file: str) -> bool:
    """Whether a file is of torch, Python's library or fxsched's tracing."""
    library = file.startswith((LIBRARY, "<frozen")) and not installed(file)
    return file.startswith(FOREIGN) or library


def installed(file: str) -> bool:
    """Whether a file is of an installed package."""
    return "site-packages" in file or "dist-packages" in file
