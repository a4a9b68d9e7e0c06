"""Whose code a frame is of: the user's, an installed package's, or torch's."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence

import torch

LIBRARY = os.path.dirname(os.__file__)
FOREIGN = (os.path.dirname(torch.__file__), os.path.dirname(__file__))


def own_frame(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary:
    """The innermost of frames that is of the user's code, or of a package."""
    own = [each for each in frames if not foreign(each.filename)]
    return (own or list(frames))[-1]


def where_it_is(frame: traceback.FrameSummary) -> str:
    """A frame's file, line and code, as tracebacks have it."""
    return "".join(traceback.format_list([frame])).strip()


def foreign(file: str) -> bool:
    """Whether a file is of torch, Python's library or fxsched's tracing."""
    library = file.startswith((LIBRARY, "<frozen")) and not installed(file)
    return file.startswith(FOREIGN) or library


def installed(file: str) -> bool:
    """Whether a file is of an installed package."""
    return "site-packages" in file or "dist-packages" in file
