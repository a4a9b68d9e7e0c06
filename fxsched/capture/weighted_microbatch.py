"""A microbatch for loss_reduction="weighted": what inputs decide is given to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ..ir.early import Early, early_values
from ..ir.graphs import Role, Spec
from ..ir.meta import note, of_node
from ..ir.regions import is_region
from ..placement.kinds import Kind, Rows, first_cause, meet
from ..placement.weighted_loss import parts_of_sum
from .microbatch import Microbatch

aten = torch.ops.aten


class WeightedMicrobatch(Microbatch):
    """One whose reductions of inputs alone are inputs themselves, computed for the
    whole batch before the step; see placement/weighted_loss.py."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.totals: dict[fx.Node, fx.Node] = {}  # of the whole batch, inputs here
        self._early: set[fx.Node] = set()  # what inputs alone decide
        self._own: dict[fx.Node, tuple[Any, Tensor]] = {}  # a microbatch's own value
        self._wanted = self.returned()

    def note_input(self, node: fx.Node) -> None:
        """What depends on inputs alone starts from these."""
        self._early.add(node)

    def call(self, node: fx.Node) -> None:
        """As for any microbatch; what inputs decide becomes an input."""
        level = self._level(node)
        super().call(node)
        new, value = self.new[node], self.values[node]
        if not isinstance(new, fx.Node):
            return
        if level:
            self.tracker.put(value, level)
            of_node(new)["rows"] = level
        drawn = of_node(new)["random"] or is_region(node)
        if drawn or not self._early.issuperset(node.all_input_nodes):
            return
        self._early.add(node)
        tensor = isinstance(value, Tensor) and not of_node(new)["mutates"]
        if tensor and self.tracker.of(value).reduced:
            self._set_aside(node, value)

    def _level(self, node: fx.Node) -> Rows | None:
        """Before a mean is added to a sum, parts it among the microbatches; the rows
        of what they add up to."""
        rows = [self.rows(operand) for operand in node.args]
        uneven = [] if any(map(meet, rows)) else parts_of_sum(node, rows)
        floats = node.meta["example_value"].is_floating_point() if uneven else False
        if not floats or node not in self._wanted:
            return None
        self.arguments[node] = node.args
        for i in uneven:
            part: Any = node.args[i]
            if isinstance(part, fx.Node):
                with self.gm.graph.inserting_before(node):
                    args = (part, 1.0 / self.batch.microbatches)
                    whole = part
                    part = self.gm.graph.call_function(aten.mul.Tensor, args)
                part.meta.update(whole.meta)
                self.call(part)
            else:
                part = part / self.batch.microbatches
            node.update_arg(i, part)
        cause = first_cause([each for each in rows if each is not None])
        return Rows(Kind.SUM, cause=cause)

    def _set_aside(self, node: fx.Node, value: Tensor) -> None:
        """What reads a value from here on reads an input, computed before the step."""
        self._own[node] = self.new[node], value
        number = len(self.totals)
        last = self.graph.find_nodes(op="placeholder")[-1]
        with self.graph.inserting_after(last):
            new = self.graph.placeholder(f"batch_total_{number}")
        with self.mode:
            fake = Spec.of(value).empty()
        index = len(self.inputs) + number
        note(new, role=Role.SHARED, name=new.name, index=index, module="")
        self.put_input(node, new, fake)
        self.totals[node] = new

    def outputs(self) -> list[Any]:
        """What is returned is the microbatch's own: outputs are put together."""
        results = super().outputs()
        for node in self._own.keys() & set(results):
            self.new[node], self.values[node] = self._own[node]
        return results

    def totals_text(self) -> str:
        """What explain() says of them."""
        if not self.totals:
            return ""
        size = sum(self.values[node].nbytes for node in self.totals)
        return (
            "numbers that depend only on inputs, such as the count of labels that "
            "aren't ignored, are computed on the whole batch before the step "
            f"({size} B), and need no global-batch stage"
        )

    def early(self) -> Early | None:
        """What computes the inputs that follow those of the call."""
        if not self.totals:
            return None
        for node in reversed(self.graph.nodes):
            call = node.op == "call_function"
            unread = call and not node.users and "mutates" in of_node(node)
            if unread and not of_node(node)["mutates"] and not is_region(node):
                self.graph.erase_node(node)
        early = early_values(list(self.totals), range(len(self.inputs)))
        assert early is not None, "inputs alone decide these"
        return early
