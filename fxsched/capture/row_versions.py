"""What joint nodes make, computed by microbatches, each its own rows.

Where rows meet in products of pairs and the like, a microbatch can have its rows of
them of its own rows of one operand and the other one gathered; what reduces them then
is a sum or mean of microbatches' again. A value of all pairs has rows along two
dimensions: what is read along the other one is computed again, of its own operands.

before: logits = text @ image.T; loss = cross_entropy(logits, y) + cross_entropy(
        logits.T, y)                                        # all of it joint
after:  texts, images = join(text), join(image)             # joint
        rows = text @ images.T; columns = texts @ image.T   # of a microbatch
        loss = cross_entropy(rows, y) + cross_entropy(columns.T, y)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx

from ..ir.graphs import name_of
from ..ir.meta import of_node
from ..ir.modes import unlogged
from ..ir.own_rows import eye_columns, eye_rows, own_diagonal
from ..ir.regions import inside_regions
from ..ir.written import written
from ..jobs.job import PlanError
from ..partition.costs import copied
from ..placement.kinds import Kind, Rows
from .domains import Domains
from .microbatch import Microbatch, WholeBatch, add, rows_of

DIAGONALS = ("diagonal", "diag")
CHOICES = 32  # of what to read of operands, that are tried for one node
Dim = int | None  # with the rows; None for a part of a sum or mean over them


class RowVersions:
    """Versions of joint nodes that microbatches compute.

    of_whole: gives the node of a value of the whole batch.
    """

    def __init__(
        self,
        trace: Microbatch,
        whole: WholeBatch,
        domains: Domains,
        of_whole: Callable[[fx.Node], fx.Node],
    ) -> None:
        self.trace, self.whole, self.domains = trace, whole, domains
        self.joint, self.of_whole = domains.joint, of_whole
        self._versions: dict[tuple[fx.Node, Dim], fx.Node | None] = {}
        self._added: list[fx.Node] = []
        self._inside = inside_regions(trace.gm.graph)

    def drop_unused(self, outputs: Collection[fx.Node]) -> None:
        """Erases what was only tried, but for what is returned."""
        for new in reversed(self._added):
            if not new.users and new not in outputs:
                self.trace.graph.erase_node(new)

    def of(self, node: fx.Node, dim: Dim) -> fx.Node | None:
        """A microbatch's rows of a joint value along a dimension, or its part of what
        is a sum or mean over them; None if it can't have that."""
        key = node, dim
        if key not in self._versions:
            self._versions[key] = None
            self._versions[key] = self._find(node, dim)
        return self._versions[key]

    def rows(self, version: fx.Node) -> Rows:
        """What became of the rows of the batch in it."""
        return self.trace.tracker.of(of_node(version)["val"])

    def dims(self, node: fx.Node) -> list[int]:
        """The dimensions of a value that are as long as the batch, or a multiple."""
        value = node.meta.get("example_value")
        return self.domains.tracker.dims(value) if isinstance(value, Tensor) else []

    def _find(self, node: fx.Node, dim: Dim) -> fx.Node | None:
        trace = self.trace
        new = trace.new[node]
        if not isinstance(new, fx.Node) or not isinstance(trace.values[node], Tensor):
            return None
        if node not in self.joint and self._is_own(node, dim):
            return new
        if node in self.domains.around:
            own = dim is not None and self._is_own(node, dim)
            return self._part(node, dim) if own and dim is not None else None
        if dim is not None and self._is_of_sizes(node):
            return self._eye(node, dim) or self._run(node, dim) or self._part(node, dim)
        if name_of(node.target) in DIAGONALS and len(node.args) == 1 and dim == 0:
            return self._diagonal(node)
        return self._run(node, dim)

    def _run(self, node: fx.Node, dim: Dim) -> fx.Node | None:
        """A joint node on a microbatch's parts of what it reads."""
        new = self.trace.new[node]
        effects = of_node(new).get("random") or of_node(new).get("mutates")
        effects = effects or node in self.trace.tracker.unlinear
        effects = effects or node.target is written
        again = node in self.joint and not effects and node not in self._inside
        again = again and node not in self.trace.arguments  # parts of a mean in a sum
        if not again or self._reads_sizes(node):
            return None
        for choice in self._choices(node):
            version = self._computed(node, choice)
            if version is not None and self._is_right(node, dim, version):
                return version
        return None

    def _eye(self, node: fx.Node, dim: int) -> fx.Node | None:
        """A microbatch's rows, or columns, of ones on the diagonal."""
        value = self.whole.values[node]
        if name_of(node.target) != "eye" or self.dims(node) != [0, 1]:
            return None
        if value.shape[0] != value.shape[1]:
            return None
        target = eye_columns if dim else eye_rows
        args = (self._numbers(node), value.shape[0], value.dtype)
        return self._made(node, target, args, dim)

    def _diagonal(self, node: fx.Node) -> fx.Node | None:
        """A microbatch's part of the diagonal of a value of all pairs."""
        (pairs,) = node.all_input_nodes
        shape = self.whole.values[pairs].shape
        rows = self.of(pairs, 0) if len(shape) == 2 and shape[0] == shape[1] else None
        if rows is None or node in self._inside:
            return None
        return self._made(node, own_diagonal, (rows, self._numbers(pairs)), 0)

    def _part(self, node: fx.Node, dim: int) -> fx.Node:
        """A microbatch's rows of a value of the whole batch."""
        return rows_of(self.trace, self.of_whole(node), dim, node)

    def _numbers(self, like: fx.Node) -> fx.Node:
        """The numbers of a microbatch's rows, along a dimension of a value."""
        value, trace = self.whole.values[like], self.trace
        size, device = value.shape[0], value.device
        with trace.mode:
            numbers = torch.arange(size, device=device)
        new = add(trace, trace.new[like], torch.arange, size, like=like, value=numbers)
        new.kwargs = {"device": device}
        return rows_of(trace, new, 0, like)

    def _made(self, node: fx.Node, target: Any, args: Any, dim: int) -> fx.Node:
        """What a function gives that takes a node's place."""
        old = self.trace.new[node]
        values = fx.map_arg(args, lambda n: of_node(n)["val"])
        with self.trace.mode:
            value = target(*values)
        with self.trace.graph.inserting_after(old):
            new = self.trace.graph.call_function(target, args)
        new.meta = {**old.meta, "val": value, "work": copied(value, self.trace.target)}
        self.trace.tracker.put(value, Rows(Kind.SHARD, dim))
        self._added.append(new)
        return new

    def _is_own(self, node: fx.Node, dim: Dim) -> bool:
        """Whether a microbatch has such a part anyway."""
        if dim is None:
            return self.domains.reduced(node)
        rows = self.domains.rows(node)
        return self.domains.in_parts(node) and rows is not None and rows.dim == dim

    def _is_of_sizes(self, node: fx.Node) -> bool:
        """Whether a value, such as arange's, comes of the size of the batch alone."""
        tensors = [n for n in node.all_input_nodes if self.domains.rows(n) is not None]
        if not (tensors or self._reads_sizes(node)) or not node.op.startswith("call"):
            return False
        return all(map(self._is_of_sizes, tensors))

    def _reads_sizes(self, node: fx.Node) -> bool:
        """Whether a node reads a number that depends on the batch's size."""
        values = (n.meta.get("example_value") for n in node.all_input_nodes)
        return any(map(self.domains.tracker.depends, values))

    def _choices(self, node: fx.Node) -> Iterator[dict[fx.Node, fx.Node]]:
        """What a microbatch may read of what a node reads: as few whole values as can
        be, but not nothing else."""
        operands = {
            n: options for n in node.all_input_nodes if (options := self._options(n))
        }
        every = list(product(*operands.values()))[:CHOICES]
        every.sort(key=lambda choice: sum(dim == "whole" for dim in choice))
        for choice in every:
            if all(dim == "whole" for dim in choice):
                continue
            versions: dict[fx.Node, fx.Node] = {}
            for operand, dim in zip(operands, choice, strict=True):
                version = self._operand(operand, dim)
                if version is None:
                    break
                versions[operand] = version
            else:
                yield versions

    def _options(self, node: fx.Node) -> list[Dim | str]:
        """The dimensions that a microbatch may have rows along, or "whole"; nothing for
        what is the same in all of them."""
        rows = self.domains.rows(node)
        if rows is None or (rows.kind is Kind.REPLICATE and node not in self.joint):
            return []
        dims = self.dims(node)
        if not dims:
            return [None, "whole"]
        made = node not in self.joint or node in self.domains.around
        gathered = made and self.domains.in_parts(node)
        gathered |= len(dims) == 1 and self._is_of_sizes(node)
        return [*dims, *["whole"] * gathered]

    def _operand(self, node: fx.Node, dim: Dim | str) -> fx.Node | None:
        if isinstance(dim, str):
            return self.of_whole(node)
        return self.of(node, dim)

    def _computed(
        self, node: fx.Node, operands: dict[fx.Node, fx.Node]
    ) -> fx.Node | None:
        """A node's value of these; None if it can't be computed of them."""
        trace, tracker = self.trace, self.trace.tracker
        old, touched = trace.new[node], (*operands, node)
        before = [(n, trace.new[n], trace.values[n]) for n in touched]
        exact = tracker.exact
        tracker.exact, tracker.sized = False, False
        trace.new.update(operands)
        trace.values.update((n, of_node(new)["val"]) for n, new in operands.items())
        try:
            with trace.graph.inserting_after(old), unlogged():
                Microbatch.call(trace, node)
            version: fx.Node = trace.new[node]
            self._added.append(version)
            of_node(version)["key"] = of_node(old)["key"]  # as profiled
            return version
        except PlanError:  # the shapes of these don't go together
            return None
        finally:
            tracker.exact, tracker.sized = exact, True
            for n, new, value in before:
                trace.new[n], trace.values[n] = new, value

    def _is_right(self, node: fx.Node, dim: Dim, version: fx.Node) -> bool:
        """Whether a value is what is looked for."""
        value = of_node(version)["val"]
        if not isinstance(value, Tensor):
            return False
        rows, shape = self.rows(version), list(self.whole.values[node].shape)
        if not rows.plain:
            return False
        if dim is None:
            kinds = Kind.SUM, Kind.MEAN
            return rows.kind in kinds and list(value.shape) == shape
        shape[dim] //= self.trace.batch.microbatches
        apart = rows.kind is Kind.SHARD and rows.place == (dim, 1)
        return apart and list(value.shape) == shape
