"""The layouts of gradients that stages give each other, which deterministic=True keeps
so that they round as in one process."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ..autodiff.gradient_strides import Strides, has_way_back, repeats
from ..autodiff.stage_graphs import StageGraphs
from ..ir.joint import is_pointer
from ..ir.meta import of_call


class GradientLayouts:
    """The strides of gradients before they were sent, by value, noted from the last
    stage to the first."""

    def __init__(self) -> None:
        self.strides: dict[fx.Node, Strides | None] = {}  # None: contiguous

    def of(self, outputs: Sequence[fx.Node]) -> dict[int, Strides]:
        """Of the outputs of a stage, those whose gradients had other strides."""
        known = enumerate(map(self.strides.get, outputs))
        return {i: strides for i, strides in known if strides is not None}

    def note(self, inputs: Sequence[fx.Node], graphs: StageGraphs) -> int | None:
        """Notes the gradients that a stage gives; the number of an input for whose
        gradient the maker can't make the layout again: one with gaps, one of the whole
        batch, or a sum of what two stages give."""
        for i in graphs.input_gradients:
            value, strides = inputs[i], graphs.strides.get(i)
            if value.op == "placeholder":
                continue
            again = value in self.strides and (strides or self.strides[value])
            if again or (strides and not _comes_back(value, strides)):
                return i
            self.strides[value] = None if is_pointer(value) else strides
        return None


def _comes_back(value: fx.Node, strides: Strides) -> bool:
    if is_pointer(value):  # its rows are those of other microbatches too
        return repeats(strides)
    return has_way_back(of_call(value)["specs"][0].shape, strides)
