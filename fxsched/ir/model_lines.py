"""Which line of the user's model an operation of a stage's flat graphs comes from.

A flat graph may be of several equal stages: its nodes carry the number of the node, in
the graph of a stage, that they were traced from, and each stage has lines of its own.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import fx

from .meta import of_node
from .user_line import line_of

LINE = "line"  # in meta["custom"], which torch hands on from node to node
LINES = "lines"  # in the meta of the module that a program calls for a job


class ModelLine(NamedTuple):
    """The module that an operation was called in, and the stack of the call."""

    module: str
    stack: str | None

    def __str__(self) -> str:
        module = f", module {self.module}" if self.module else ""
        return f"{module}{line_of(self.stack)}"


Lines = tuple[ModelLine, ...]


def model_lines(stage: fx.Graph) -> Lines:
    """Of each node of a stage, as it was cut out of the model."""
    return tuple(
        ModelLine(of_node(node).get("module", ""), node.meta.get("stack_trace"))
        for node in stage.nodes
    )


def line_in_model(node: fx.Node, lines: Lines) -> ModelLine | None:
    """Of a node of a flat graph; None for what no one operation of the model makes."""
    number = of_node(node).get("custom", {}).get(LINE)
    return None if number is None or number >= len(lines) else lines[number]
