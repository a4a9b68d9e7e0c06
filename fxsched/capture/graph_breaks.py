"""Graphs that hold only a part of the model, and the line at which Dynamo left it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from ..jobs.job import PlanError

EXPORTED = (
    "fxsched.compile(model, schedule) runs an nn.Module that Dynamo breaks, if "
    "torch.export can trace it"
)


class Exporter(Protocol):
    """A backend, which can have torch.export trace a model."""

    def exported(
        self,
        model: nn.Module,
        broken: GraphBreak,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Callable[..., Any]:
        """The model, traced for this call."""


class GraphBreak(PlanError):
    """Dynamo can't trace a model as one graph.

    text: what to do about it. line: where it breaks, and why.
    backend: whose call it ends.
    """

    def __init__(self, text: str, line: str) -> None:
        super().__init__(f"{text}; {EXPORTED}")
        self.text, self.line = text, line
        self.backend: Exporter | None = None

    def __reduce__(self) -> tuple[type[GraphBreak], tuple[str, str]]:
        return type(self), (self.text, self.line)


class FixedBatch(GraphBreak):
    """Dynamo's graph is whole, but for one batch size alone."""


def left_to_python() -> GraphBreak | None:
    """The error for a graph that holds only a part of the model, if it does.

    Called inside a torch.compile backend. Dynamo runs a function that it has rules to
    skip in Python, and compiles what that calls.
    """
    skipped = _skipped_frame()
    if skipped is None:
        return None
    where = "".join(traceback.format_list([skipped])).strip()
    return GraphBreak(
        "the model does not trace as one graph; Dynamo leaves this to Python\n"
        f"  {where}\n"
        "fxsched plans whole models: torch.compile(model, backend, fullgraph=True) "
        "tells why it does",
        f"{_short(skipped)} is left to Python",
    )


def not_whole(
    stack: Sequence[traceback.FrameSummary] | None, reason: object
) -> GraphBreak:
    """The error for a line of the model that Dynamo can't trace, and why it can't."""
    frames = list(stack or ())
    library = os.path.dirname(traceback.__file__)
    # of what breaks inside Python's own library, the line that calls it
    while len(frames) > 1 and os.path.dirname(frames[-1].filename) == library:
        frames.pop()
    where = "".join(traceback.format_list(frames[-1:])).strip()
    why = str(reason).split("\n")[0]
    return GraphBreak(
        f"the model does not trace as one graph; it breaks at\n  {where}\n"
        f"  ({why})\n"
        "fxsched plans whole models: rewrite that line with torch operations, or "
        "move it out of the compiled function",
        f"{_short(frames[-1]) if frames else ''} ({why})".strip(),
    )


def _short(frame: traceback.FrameSummary) -> str:
    return f"{os.path.basename(frame.filename)}:{frame.lineno}, {frame.line}"


def _skipped_frame() -> traceback.FrameSummary | None:
    """The user's Python frame between torch.compile's call and Dynamo, if any."""
    stack = traceback.extract_stack()
    paths = [frame.filename.replace("\\", "/") for frame in stack]
    dynamo = [i for i, p in enumerate(paths) if p.endswith("/_dynamo/convert_frame.py")]
    calls = [
        i
        for i, p in enumerate(paths)
        if p.endswith("/_dynamo/eval_frame.py") and dynamo and i < dynamo[0]
    ]
    if not calls:
        return None
    torch_folder = os.path.dirname(torch.__file__)
    between = stack[calls[-1] + 1 : dynamo[0]]
    user = [frame for frame in between if not frame.filename.startswith(torch_folder)]
    return user[-1] if user else None
