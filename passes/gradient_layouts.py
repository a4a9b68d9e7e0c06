"""Refuses gradients that round otherwise once they are sent, where deterministic=True
asks for the bits of one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ..autodiff.stage_graphs import StageGraphs
from .gradient_order import other_layout


class GradientLayouts:
    """The gradients that stages give each other, from the last stage to the first.

    What is sent is contiguous, and a product or a sum of a transposed gradient may
    round otherwise than one of its copy. A gradient that only repeats elements, as a
    mean's does, is the same to operations that go element by element.
    """

    def __init__(self) -> None:
        self.expanded: dict[fx.Node, int] = {}  # and the stage that gives it

    def check(
        self,
        stage: int,
        graphs: StageGraphs,
        inputs: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
    ) -> None:
        """Raises PlanError where a stage gives or gets such a gradient.

        inputs, outputs: the values that it reads and makes, in the graph of stages.
        """
        computed = {
            i: value for i, value in enumerate(inputs) if value.op != "placeholder"
        }
        for i in filter(computed.__contains__, graphs.reordered):
            what = f"stage {stage} gives the gradient of {computed[i].name}"
            raise other_layout(what, computed[i])
        for i in filter(computed.__contains__, graphs.expanded):
            self.expanded[computed[i]] = stage
        for i, value in enumerate(outputs):
            if value in self.expanded and not _by_element(graphs, i):
                what = (
                    f"stage {self.expanded[value]} gives the gradient of {value.name}"
                )
                raise other_layout(what, value)


def _by_element(graphs: StageGraphs, output: int) -> bool:
    """Whether B reads the gradient of an output element by element alone."""
    if graphs.backward is None:
        return True
    given = graphs.backward.graph.find_nodes(op="placeholder")
    return all(
        torch.Tag.pointwise in getattr(user.target, "tags", ())
        for node, source in zip(given, graphs.needs, strict=False)
        if source == ("tangent", output)
        for user in node.users
    )
