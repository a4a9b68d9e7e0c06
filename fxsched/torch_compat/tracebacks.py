"""Tracebacks of errors in how fxsched is used, with the frames of the user alone."""

from __future__ import annotations

import os
import sysconfig
from types import TracebackType

import torch
from torch._dynamo.exc import InternalTorchDynamoError

from ..jobs.job import PlanError

FULL = "FXSCHED_TRACEBACK"  # the environment variable; "full" leaves them as they are
TRACING = ("torch._dynamo.", "torch._subclasses.", "torch.export.", "torch.fx.")
OURS = (
    os.path.dirname(os.path.dirname(__file__)),
    os.path.dirname(torch.__file__),
    "<",
)
PYTHON = sysconfig.get_path("stdlib")


def shortened(error: BaseException) -> BaseException:
    """The error without frames of fxsched, torch and Python's library, and without
    causes that have no others or are torch's, which say that it can't trace a model.

    Other errors, such as a TypeError, may be a bug: they and causes of theirs stay.
    """
    cause = error.__cause__
    if os.environ.get(FULL) != "full" and isinstance(error, PlanError):
        error.__traceback__ = _of_user(error.__traceback__)
        error.__suppress_context__ = True
        if cause and (_is_of_tracing(cause) or _is_empty(shortened(cause))):
            error.__cause__ = None
    return error


def _is_of_tracing(error: BaseException | None) -> bool:
    if error is None or isinstance(error, PlanError):
        return error is None
    internal = isinstance(error, InternalTorchDynamoError)
    known = type(error).__module__.startswith(TRACING) and not internal
    return known and _is_of_tracing(error.__cause__)


def _is_empty(error: BaseException) -> bool:
    frames = error.__traceback__ or error.__cause__
    return isinstance(error, PlanError) and frames is None


def _of_user(frames: TracebackType | None) -> TracebackType | None:
    if frames is None:
        return None
    rest, file = _of_user(frames.tb_next), frames.tb_frame.f_code.co_filename
    python = (
        file.startswith(PYTHON) and "-packages" not in file
    )  # others' are there too
    if python or file.startswith(OURS):
        return rest
    return TracebackType(rest, frames.tb_frame, frames.tb_lasti, frames.tb_lineno)
