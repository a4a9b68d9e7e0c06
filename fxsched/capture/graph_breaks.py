"""Lines of a model at which Dynamo, or torch.export after it, stops tracing."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Sequence
from traceback import FrameSummary, StackSummary

import torch

from ..jobs.job import PlanError

LIBRARY = os.path.dirname(os.__file__)
TORCH = os.path.dirname(torch.__file__)
OWN = os.path.dirname(__file__)
FOREIGN = (TORCH, OWN, os.path.join(os.path.dirname(OWN), "torch_compat"))
COMPILES, CALLS = "/_dynamo/convert_frame.py", "/_dynamo/eval_frame.py"
# In errors of Dynamo and torch.export.
BY_VALUES = ("DataDependent", "DynamicOutputShape", "data-dependent", "unbacked")
VALUES = (
    "which tracing doesn't know; write it with torch.where or a mask, or compute it "
    "outside of the model and pass a Python value"
)
REWRITE = "write that line with other torch operations, or move it out of the model"
COUNT = "float(self.num_batches_tracked)"  # in torch's BatchNorm
MOMENTUM = (
    "a BatchNorm with momentum=None averages over its calls, and tracing doesn't know "
    "how many there were; give momentum= a number"
)
EXPORTED = (
    "fxsched.compile(model, schedule) runs an nn.Module that Dynamo breaks, if "
    "torch.export can trace it"
)


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


class GraphBreak(PlanError):
    """Dynamo can't trace a model as one graph.

    text: what to do about it. line: where it breaks, and why.
    """

    def __init__(self, text: str, line: str) -> None:
        super().__init__(f"{text}; {EXPORTED}")
        self.text, self.line = text, line

    def __reduce__(self) -> tuple[type[GraphBreak], tuple[str, str]]:
        return type(self), (self.text, self.line)


class FixedBatch(GraphBreak):
    """Dynamo's graph is whole, but for one batch size alone."""


def left_to_python() -> GraphBreak | None:
    """The error for a graph that holds only a part of the model, if it does.

    Called inside a torch.compile backend. Dynamo runs a function that it has rules to
    skip in Python, and compiles what that calls.
    """
    stack = traceback.extract_stack()
    files = [frame.filename for frame in stack]
    inner = next((i for i, file in enumerate(files) if file.endswith(COMPILES)), 0)
    calls = [i for i, file in enumerate(files[:inner]) if file.endswith(CALLS)]
    between = stack[calls[-1] + 1 : inner] if calls else []
    skipped = [frame for frame in between if not frame.filename.startswith(TORCH)]
    if not skipped:
        return None
    return GraphBreak(
        "the model does not trace as one graph; Dynamo leaves this to Python\n"
        f"  {where_it_is(skipped[-1])}\n"
        "fxsched plans whole models: torch.compile(model, backend, fullgraph=True) "
        "tells why it does",
        f"{_short(skipped[-1])} is left to Python",
    )


def why_of(error: BaseException, made: str = "") -> str:
    """Why a tracer stops at a line, in few words: PyTorch's texts have many lines, and
    call what depends on values u0.

    made: the line that makes the size which depends on values, if it is another.
    """
    text = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
    if not any(word in text for word in BY_VALUES):
        return text.split(".Hint")[0]
    size = f"a size that {made} makes of " if made else ""
    return f"this line depends on {size}the value of a tensor"


def not_whole(frames: Sequence[FrameSummary], error: BaseException) -> GraphBreak:
    """The error for a line of the model that Dynamo can't trace, and why it can't."""
    why = why_of(error).removeprefix(f"{type(error).__name__}: ")
    where, short = "", ""
    if frames:
        where, short = where_it_is(own_frame(frames)), _short(own_frame(frames))
    return GraphBreak(
        f"the model does not trace as one graph; it breaks at\n  {where}\n"
        f"  ({why})\n"
        "fxsched plans whole models: rewrite that line with torch operations, or "
        "move it out of the compiled function",
        f"{short} ({why})".strip(),
    )


def not_exported(error: Exception, made: Iterable[StackSummary]) -> PlanError:
    """The error for a line of the model that torch.export can't trace either.

    made: where sizes that the error is about, and values say, were made.
    """
    frames = traceback.extract_tb(error.__traceback__)
    frame = own_frame(frames)
    lines = sorted({_short(own_frame(each)) for each in made} - {_short(frame)})
    why = why_of(error, lines[0] if lines else "")
    text = f"{why}, {VALUES}" if why.startswith("this") else f"  ({why})\n{REWRITE}"
    if any(COUNT in (each.line or "") for each in frames):
        text = MOMENTUM
    return PlanError(
        "the model can't be traced; torch.export stops at\n"
        f"  {where_it_is(frame)}\n{text}"
    )


def _short(frame: FrameSummary) -> str:
    return f"{os.path.basename(frame.filename)}:{frame.lineno}, {frame.line}"
