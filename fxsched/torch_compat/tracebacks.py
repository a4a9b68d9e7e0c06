"""Tracebacks of errors in how fxsched is used, with the frames of the user alone."""

from __future__ import annotations

import logging
import os
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from types import TracebackType

import torch
from torch._dynamo.exc import InternalTorchDynamoError

from ..jobs.job import PlanError

FULL = "FXSCHED_TRACEBACK"  # the environment variable; "full" leaves them as they are
TRACING = ("torch._dynamo.", "torch._subclasses.", "torch.export.", "torch.fx.")
FXSCHED = os.path.dirname(os.path.dirname(__file__))
TORCH = (os.path.dirname(torch.__file__), "<")
PYTHON = sysconfig.get_path("stdlib")
FAKES = "torch._subclasses.fake_tensor"  # its logger's name too
SYMBOLS = "torch.fx.experimental.symbolic_shapes"
# What these loggers say, and fxsched's error too.
LOGGED = {
    FAKES: "failed while attempting to run meta for",
    SYMBOLS: "Unable to find user code",
}


def shortened(error: BaseException) -> BaseException:
    """The error without frames of fxsched, torch and Python's library, and without
    causes that have no others, are torch's, which say that it can't trace a model, or
    are of the model.

    Other errors, such as a TypeError, may be a bug: they and causes of theirs stay.
    """
    cause = error.__cause__
    if isinstance(error, PlanError) and not is_full():
        error.__traceback__ = of_user(error.__traceback__)
        error.__suppress_context__ = True
        if cause and (
            _is_of_tracing(cause) or _is_of_model(cause) or _is_empty(shortened(cause))
        ):
            error.__cause__ = None
    return error


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Without what torch logs of an operation that fails while a model is traced: an
    error says it too."""

    def other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(LOGGED[record.name])

    logs = [] if is_full() else [logging.getLogger(name) for name in LOGGED]
    for log in logs:
        log.addFilter(other)
    try:
        yield
    finally:
        for log in logs:
            log.removeFilter(other)


def is_full() -> bool:
    """Whether the user wants tracebacks as they are."""
    return os.environ.get(FULL) == "full"


def _is_of_model(error: BaseException) -> bool:
    """Whether the user's code raised it, or what it called of torch."""
    files = [f.f_code.co_filename for f, _ in walk_tb(error.__traceback__)]
    users = [f for f in files if not f.startswith(FXSCHED) and not _is_library(f)]
    return bool(users) and not files[-1].startswith(FXSCHED)


def _is_of_tracing(error: BaseException | None) -> bool:
    if error is None or isinstance(error, PlanError):
        return error is None
    internal = isinstance(error, InternalTorchDynamoError)
    known = type(error).__module__.startswith(TRACING) and not internal
    return known and _is_of_tracing(error.__cause__)


def _is_empty(error: BaseException) -> bool:
    frames = error.__traceback__ or error.__cause__
    return isinstance(error, PlanError) and frames is None


def of_user(frames: TracebackType | None) -> TracebackType | None:
    """The frames without those of fxsched, torch and Python's library."""
    if frames is None:
        return None
    rest, file = of_user(frames.tb_next), frames.tb_frame.f_code.co_filename
    if _is_library(file) or file.startswith(FXSCHED):
        return rest
    return TracebackType(rest, frames.tb_frame, frames.tb_lasti, frames.tb_lineno)


def _is_library(file: str) -> bool:
    """Whether a file is of torch, or of Python's library, where packages are too."""
    python = file.startswith(PYTHON) and "-packages" not in file
    return python or file.startswith(TORCH)
