"""The graph of all shards of a model, beside each other: what shard_stages makes."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from ..ir import joint
from ..ir.graphs import numbered_draws, storage, tensors
from ..ir.meta import note, of_node
from ..ir.parts import Cut, PartOf
from ..ir.regions import Regions
from ..ir.request import Request
from ..partition.costs import Work, copied
from ..placement.demand import Demand
from ..placement.kinds import Kind, Rows
from ..placement.layouts import Operation, value_of, writes_operand
from ..placement.own_rows import is_lone, zeroing
from ..placement.propagation import Propagation
from ..placement.region import Region

aten = torch.ops.aten
VIEWS = (aten.narrow.default, aten.unflatten.int, aten.select.int)


class Rewriter:
    """Writes the graph of all shards.

    inputs: the parts of weights, by their positions. joined: nodes of the model that
    run in parts of which some shard has all, and what it has.
    """

    def __init__(
        self, propagation: Propagation, region: Region, request: Request
    ) -> None:
        self.region, self.follower, self.nodes = (
            region,
            propagation.follower,
            propagation.nodes,
        )
        self.demand = Demand(propagation, region)
        self.every = range(propagation.follower.shards)
        self.request = request
        self.inputs: dict[int, PartOf] = {}
        self.joined: dict[fx.Node, fx.Node] = {}
        self._graph = fx.Graph()
        self._whole: dict[tuple[fx.Node, int], fx.Node] = {}  # by shard
        self._parts: dict[tuple[fx.Node, int], fx.Node] = {}
        self._zeros: dict[tuple[fx.Node, int], fx.Node] = {}
        self._slices: dict[tuple[fx.Node, int, Rows, int], fx.Node] = {}
        self._dealt: dict[tuple[fx.Node, Rows], list[fx.Node]] = {}
        self._draws = numbered_draws(self.nodes)
        self._sums: dict[tuple[fx.Node, int], fx.Node] = {}  # slices of them
        self._level = dict(self.demand.levels)

    def graph(self) -> fx.Graph:
        """The graph. Beside the stage of the model, nodes have meta["shard"], and in
        meta["level"] how often shards have read each other before."""
        with Regions() as regions:
            for node in self.nodes:
                if node.op == "output":
                    mapped = fx.map_arg(node.args[0], lambda n: self._whole[n, 0])
                    self._graph.output(mapped)
                elif node.op == "placeholder":
                    self._input(node)
                elif node in self.region.layouts:
                    self._in_parts(node)
                else:
                    regions.pass_by(node)
                    self._in_whole(node)
        return self._graph

    def _input(self, node: fx.Node) -> None:
        rows = self.region.weights.get(node)
        if rows is None or is_lone((rows,)):
            made = self._parts if rows else self._whole
            new = self._graph.node_copy(node)
            made.update({(node, p): new for p in self.every})
            return
        for p in self.every:
            index, shards = self.request.inputs + len(self.inputs), len(self.every)
            part = PartOf(of_node(node)["index"], Cut(rows.dim, rows.outer, shards), p)
            self.inputs[index] = part
            new = self._graph.placeholder(f"{node.name}_{p}")
            name = f"{of_node(node)['name']}[{p}/{shards}]"
            fake = self.follower.part(value_of(node), (rows,))
            new.meta = {**node.meta, "index": index, "val": fake, "name": name}
            if of_node(node)["index"] in self.request.cuts:
                kept = self.request.cuts[of_node(node)["index"]]
                note(new, owners=kept.owners[p], updater=kept.updaters[p])
            self._parts[node, p] = new

    def _in_parts(self, node: fx.Node) -> None:
        """A node's call on each shard, and the whole value where it is read."""
        call = self.region.calls[node]
        operation = Operation.of(node)
        if node in self.region.unbiased:
            operation = operation.unbiased
        kinds = {rows.kind for rows in self.region.layouts[node]}
        rows_of_all = Kind.OWN in kinds and call.target is None
        share = 1.0 if rows_of_all else 1 / len(self.every)
        for p in self.every:
            mine = call.on_shard(operation, p)
            operands = mine.on({n: self._read(node, n, p) for n in mine.reads})
            self._parts[node, p] = (
                self._dropped(node, operands, p)
                if of_node(node).get("random") and not rows_of_all
                else self._add(node, operands, p, share)
            )
        if node in self.region.scattered:
            self._scatter(node)
        with self._later(node, 2 if node in self.region.scattered else 1):
            for p in sorted(self.demand.wanted[node]):
                self._whole[node, p] = self.joined[node] = self._made_whole(node, p)

    def _made_whole(self, node: fx.Node, p: int) -> fx.Node:
        """All of a value on a shard, of what all have."""
        (rows,) = self.region.layouts[node]
        join = self.region.calls[node].join
        parts = [self._parts[node, q] for q in self.every]
        if join is not None:
            call = join.on({read: self._whole[read, p] for read in join.reads})
            return self._make(node, call.target, (parts, *call.args), p, call.kwargs)
        if rows.kind is Kind.SHARD:
            return self._joined(node, parts, rows, p)
        return self._sum(node, p)

    @contextmanager
    def _later(self, node: fx.Node, rounds: int) -> Iterator[None]:
        """Where shards have read each other so often since a node."""
        self._level[node] += rounds
        try:
            yield
        finally:
            self._level[node] -= rounds

    def _scatter(self, node: fx.Node) -> None:
        """The slice of a sum of each shard, which adds up what others send of it."""
        rows, every = self.region.scattered[node], self.every
        parts = [self._split(node, self._parts[node, q], rows, q) for q in every]
        with self._later(node, 1):
            for p in every:
                slices = [each[p] for each in parts]
                self._sums[node, p] = self._added(node, slices, p, rows)

    def _in_whole(self, node: fx.Node) -> None:
        """A node that is not cut, on each shard that makes its value."""
        if "stage" not in of_node(node):
            new = self._graph.node_copy(node, lambda n: self._whole[n, 0])
            self._whole.update({(node, p): new for p in self.every})
            return
        makers = sorted(self.demand.makers(node))
        for p in makers:
            reads = {n: self._whole[n, p] for n in node.all_input_nodes}
            operands = Operation.of(node).on(reads)
            self._whole[node, p] = self._add(node, operands, p, 1.0)
        if node not in self.demand.spread:
            for p in self.every:
                self._whole[node, p] = self._whole[node, 0]

    def _read(self, node: fx.Node, read: fx.Node, p: int) -> fx.Node:
        """What a shard's call in the place of a node reads."""
        if not self.demand.reads_whole(node, read):
            if node in self.region.sliced.get(read, ()):
                return self._sums[read, p]
            zeroed = node in self.region.zeroed.get(read, ())
            return self._zeroed(read, p) if zeroed else self._parts[read, p]
        rows = self.region.calls[node].slices.get(read)
        if rows is None:
            return self._whole[read, p]
        elsewhere = p not in self.demand.makers(read)
        if elsewhere and self.demand.is_dealt(node, read):
            return self._deal(read, rows)[p]
        key = read, p, rows, self._level[node]
        if key not in self._slices:
            self._slices[key] = self._part(node, self._whole[read, p], rows, p)
        return self._slices[key]

    def _dropped(self, node: fx.Node, call: Operation, p: int) -> fx.Node:
        """Dropout of a part, by the same random numbers as of the whole value."""
        (rows,) = self.region.layouts[node]
        fake, (x, *rest) = value_of(node), call.args
        whole = list(map(int, fake.shape))
        options = {"dtype": fake.dtype, "device": fake.device}
        ones = self._make(node, aten.ones.default, (whole,), p, options)
        kept = self._add(node, call._replace(args=(ones, *rest)), p, 0.0)
        mine = self._part(node, kept, rows, p)
        mine = self._make(node, aten.clone.default, (mine,), p)  # B holds no more
        return self._make(node, aten.mul.Tensor, (x, mine), p)

    def _part(self, node: fx.Node, whole: fx.Node, rows: Rows, p: int) -> fx.Node:
        """A shard's part of a value that it has all of."""
        dim, outer = rows.dim, rows.outer
        size = int(value_of(whole).shape[dim]) // (outer * len(self.every))
        if outer == 1:
            return self._make(
                node, aten.narrow.default, (whole, dim, p * size, size), p
            )
        sizes = [outer, len(self.every), size]
        blocks = self._make(node, aten.unflatten.int, (whole, dim, sizes), p)
        mine = self._make(node, aten.select.int, (blocks, dim + 1, p), p)
        return self._make(node, aten.flatten.using_ints, (mine, dim, dim + 1), p)

    def _deal(self, read: fx.Node, rows: Rows) -> list[fx.Node]:
        """The parts of a value that shard 0 has, made there."""
        if (read, rows) not in self._dealt:
            whole = self._whole[read, 0]
            self._dealt[read, rows] = self._split(read, whole, rows, 0)
        return self._dealt[read, rows]

    def _split(
        self, node: fx.Node, whole: fx.Node, rows: Rows, p: int
    ) -> list[fx.Node]:
        """All parts of a value, on one shard: views, whose gradients are one copy."""
        size = int(value_of(whole).shape[rows.dim]) // len(self.every)
        parts = self._make(node, aten.split.Tensor, (whole, size, rows.dim), p)
        items = [self._make(node, operator.getitem, (parts, q), p) for q in self.every]
        for each in (parts, *items):
            of_node(each)["work"] = Work(0, 0.0, of_node(each)["work"].backward, 0)
        return items

    def _sum(self, node: fx.Node, p: int) -> fx.Node:
        """The sum of what all shards have, in their order, and a bias that goes with
        it."""
        if node in self.region.scattered:
            slices = [self._sums[node, q] for q in self.every]
            return self._joined(node, slices, self.region.scattered[node], p)
        (rows,), every = self.region.layouts[node], self.every
        if node.target is joint.part:  # of the sum of the whole batch
            (source,) = node.all_input_nodes
            total = self._added(node, [self._read(node, source, q) for q in every], p)
            return self._add(node, Operation.of(node).on({source: total}), p, 0.0)
        own = rows.kind is Kind.OWN
        parts = [self._zeroed(node, q) if own else self._parts[node, q] for q in every]
        return self._added(node, parts, p)

    def _added(
        self, node: fx.Node, parts: Sequence[fx.Node], p: int, rows: Rows | None = None
    ) -> fx.Node:
        """The sum of parts of a sum, or of slices of them, and of the bias."""
        total = parts[0]
        for each in parts[1:]:
            total = self._make(node, aten.add.Tensor, (total, each), p)
        bias = Operation.of(node).bias if node in self.region.unbiased else None
        if bias is None:
            return total
        added, shape = self._whole[bias, p], Operation.of(node).bias_shape
        along = value_of(node).dim() - 1 if shape is None else 1
        if rows is not None and rows.dim == along:
            added = self._part(node, added, rows._replace(dim=0), p)
        if shape is not None:
            added = self._make(node, aten.reshape.default, (added, list(shape)), p)
        kind = value_of(total).dtype
        if value_of(added).dtype != kind:  # as autocast takes it
            added = self._make(node, aten.to.dtype, (added, kind), p)
        return self._make(node, aten.add.Tensor, (total, added), p)

    def _zeroed(self, node: fx.Node, p: int) -> fx.Node:
        """What a shard has, with zeros for rows of others."""
        if (node, p) not in self._zeros:
            (rows,) = self.region.layouts[node]
            part, owner = self._parts[node, p], self._whole[rows.owner.numbers, p]  # type: ignore[attr-defined]
            target, args = zeroing(rows, part, owner, p, len(self.every))
            level, self._level[node] = self._level[node], of_node(part)["level"]
            self._zeros[node, p] = self._make(node, target, args, p)
            self._level[node] = level
        return self._zeros[node, p]

    def _joined(
        self, node: fx.Node, parts: Sequence[fx.Node], rows: Rows, p: int
    ) -> fx.Node:
        """The parts of all shards as one value."""
        dim = rows.dim
        if rows.outer == 1:
            return self._make(node, aten.cat.default, (list(parts), dim), p)
        size = int(value_of(parts[0]).shape[dim]) // rows.outer
        blocks = [
            self._make(node, aten.unflatten.int, (each, dim, [rows.outer, size]), p)
            for each in parts
        ]
        joined = self._make(node, aten.cat.default, (blocks, dim + 1), p)
        return self._make(node, aten.flatten.using_ints, (joined, dim, dim + 1), p)

    def _make(
        self,
        node: fx.Node,
        target: Any,
        args: tuple[Any, ...],
        p: int,
        kwargs: Mapping[str, Any] | None = None,
    ) -> fx.Node:
        """Another operation, where a node is, on a shard."""
        call = Operation("call_function", target, args, dict(kwargs or {}), None)
        new = self._add(node, call, p, 0.0)
        note(new, work=_work(new, self.request), random=0, draws=(), mutates=())
        return new

    def _add(self, node: fx.Node, call: Operation, p: int, share: float) -> fx.Node:
        """A node's call on a shard, which has a share of its work."""
        new = self._graph.create_node(
            call.op, call.target, call.args, call.kwargs, name=node.name
        )
        reads = new.all_input_nodes
        work = Work(*(share * each for each in of_node(node)["work"]))
        new.meta = {
            **node.meta,
            "shard": p,
            "level": self._level[node],
            "work": work._replace(flops=int(work.flops), held=_held(node, reads)),
            "draws": self._draws[node],
            "mutates": _mutated(node, call) if call.target is node.target else (),
        }
        # the whole batch's are of values as they were
        same = call.target in (joint.join, joint.part) or _is_same(node, call)
        of_node(new)["val"] = value_of(node) if same else self.follower.value(call)
        return new


def _is_same(node: fx.Node, call: Operation) -> bool:
    """Whether a call reads what the node does, as it is."""
    every = (node.all_input_nodes, call.reads)
    mine, its = ([id(value_of(n)) for n in reads] for reads in every)
    return call.target is node.target and mine == its


def _held(node: fx.Node, reads: Sequence[fx.Node]) -> int:
    """Bytes that autograd keeps for a node's copy: as much of what it reads as of what
    the node does."""
    whole, part = (
        sum(
            t.nbytes
            for n in some
            if "role" not in of_node(n)
            for t in tensors(value_of(n))
        )
        for some in (node.all_input_nodes, reads)
    )
    return int(of_node(node)["work"].held * (part / whole if whole else 1.0))


def _work(node: fx.Node, request: Request) -> Work:
    values = list(tensors(value_of(node)))
    if node.target in VIEWS:
        return Work(0, 0.0, 0.0, 0)
    return copied(values[0], request.device)


def _mutated(node: fx.Node, call: Operation) -> tuple[Tensor, ...]:
    """What a node writes into, among what its copy reads."""
    if not writes_operand(node):
        return ()
    written = {storage(t) for t in of_node(node)["mutates"]}
    reads, copies = list[fx.Node](), list[fx.Node]()
    fx.map_arg((node.args, node.kwargs), reads.append)
    fx.map_arg((call.args, call.kwargs), copies.append)
    return tuple(
        value_of(new)
        for old, new in zip(reads, copies, strict=True)
        if any(storage(t) in written for t in tensors(value_of(old)))
    )
