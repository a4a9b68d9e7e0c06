"""The line of the user's model that a traced operation comes from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import torch

FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n?[ \t]*(.*)')
TORCH = str(Path(torch.__file__).parent)


class UserLine(NamedTuple):
    """Where it is, and its text."""

    path: str
    number: int
    function: str
    code: str

    def __str__(self) -> str:
        return f"{self.path}:{self.number}, in {self.function}: {self.code}"


def user_line(stack: str | None) -> UserLine | None:
    """The innermost line of a node's "stack_trace" that is not torch's own, else the
    innermost one; None where nothing is known."""
    frames = FRAME.findall(stack or "")
    outside = [frame for frame in frames if not frame[0].startswith(TORCH)] or frames
    if not outside:
        return None
    path, number, function, code = outside[-1]
    return UserLine(path, int(number), function, code.strip())


def line_of(stack: str | None) -> str:
    """The user's line on a line of its own; nothing where it is not known."""
    line = user_line(stack)
    return f"\n  at {line}" if line else ""
