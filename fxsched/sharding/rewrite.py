"""The graph of all shards of a model, beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..costmodel.costs import Work, copied
from ..ir.graphs import storage, tensors
from ..ir.parts import Cut, PartOf
from ..ir.regions import Regions
from ..ir.request import Request
from ..rows.kinds import Kind, Rows
from .layouts import Operation, value_of
from .region import Grower, Region, is_weight, writes_operand


class Rewriter:
    """Writes the graph of all shards.

    inputs: the parts of weights, by their positions. joined: nodes of the model that
    run in parts of which some shard has all, and what it has.
    """

    def __init__(self, grower: Grower, region: Region, request: Request) -> None:
        self.region, self.follower, self.nodes = region, grower.follower, grower.nodes
        self.pinned = grower.whole | grower.written
        self.pinned |= set(filter(writes_operand, self.nodes))
        self.every = range(grower.follower.shards)
        self.request = request
        self.inputs: dict[int, PartOf] = {}
        self.joined: dict[fx.Node, fx.Node] = {}
        self._graph = fx.Graph()
        self._whole: dict[tuple[fx.Node, int], fx.Node] = {}  # by shard
        self._parts: dict[tuple[fx.Node, int], fx.Node] = {}
        self._slices: dict[tuple[fx.Node, int, Rows, int], fx.Node] = {}
        self._numbers = _numbered_draws(self.nodes)
        self._spread: set[fx.Node] = set()  # what each shard makes that reads it
        self._wanted = self._demand()
        self._level = self._levels()

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

    def _demand(self) -> dict[fx.Node, set[int]]:
        """The shards on which the whole of each value is read."""
        near: set[fx.Node] = set()  # what parts go into
        for node in self.nodes:
            if any(n in near or n in self.region.layouts for n in node.all_input_nodes):
                near.add(node)
        wanted: dict[fx.Node, set[int]] = {node: set() for node in self.nodes}
        for node in reversed(self.nodes):
            where = wanted[node]
            if node.op == "output":
                where = {0}
            elif node in self.region.layouts:
                where = set(self.every)
            elif self._is_spread(node, near, wanted):
                self._spread.add(node)
            else:
                where = {0} & where
            for read in node.all_input_nodes:
                if node in self.region.layouts and not self._reads_whole(node, read):
                    continue
                with_sum = node in self.region.unbiased and (
                    read is Operation.of(node).bias
                )
                wanted[read] |= wanted[node] if with_sum else where
        return wanted

    def _levels(self) -> dict[fx.Node, int]:
        """How often shards have read each other before what each node gives, the same
        on all shards, so that none waits for more than it reads."""
        levels: dict[fx.Node, int] = {}
        for node in self.nodes:
            reads = (
                levels[n] + self._is_read_over(node, n) for n in node.all_input_nodes
            )
            levels[node] = max(reads, default=0)
        return levels

    def _is_read_over(self, node: fx.Node, read: fx.Node) -> bool:
        """Whether a shard reads a value from another."""
        cut = node in self.region.layouts
        if read in self.region.layouts:
            return not cut or self._reads_whole(node, read)
        if read in self._spread or "stage" not in read.meta:
            return False
        return cut or (node in self._spread and self._wanted[node] != {0})

    def _is_spread(
        self, node: fx.Node, near: set[fx.Node], wanted: Mapping[fx.Node, set[int]]
    ) -> bool:
        """Whether each shard that reads a value makes it, of what it has."""
        if node in self.pinned or "stage" not in node.meta:
            return False
        if any(is_weight(n) and value_of(n).dim() > 1 for n in node.all_input_nodes):
            return False
        made = [n for n in node.all_input_nodes if "stage" in n.meta]
        return node in near or all(wanted[n] >= wanted[node] for n in made)

    def _reads_whole(self, node: fx.Node, read: fx.Node) -> bool:
        """Whether a node that runs in parts reads all of a value."""
        cut = read in self.region.layouts or read in self.region.weights
        return not cut or self.region.whole(read, node)

    def _input(self, node: fx.Node) -> None:
        rows = self.region.weights.get(node)
        if rows is None:
            new = self._graph.node_copy(node)
            self._whole.update({(node, p): new for p in self.every})
            return
        for p in self.every:
            index, shards = self.request.inputs + len(self.inputs), len(self.every)
            part = PartOf(node.meta["index"], Cut(rows.dim, rows.outer, shards), p)
            self.inputs[index] = part
            new = self._graph.placeholder(f"{node.name}_{p}")
            name = f"{node.meta['name']}[{p}/{shards}]"
            fake = self.follower.part(value_of(node), (rows,))
            new.meta = {**node.meta, "index": index, "val": fake, "name": name}
            if node.meta["index"] in self.request.cuts:
                kept = self.request.cuts[node.meta["index"]]
                new.meta["owners"] = kept.owners[p]
            self._parts[node, p] = new

    def _in_parts(self, node: fx.Node) -> None:
        """A node's call on each shard, and the whole value where it is read."""
        call = self.region.calls[node]
        operation = Operation.of(node)
        if node in self.region.unbiased:
            operation = operation.unbiased
        operation = operation._replace(args=call.args, kwargs=call.kwargs)
        for p in self.every:
            reads = {n: self._read(node, n, p) for n in operation.reads}
            operands = operation.on(reads)
            self._parts[node, p] = (
                self._dropped(node, operands, p)
                if node.meta.get("random")
                else self._add(node, operands, p, 1 / len(self.every))
            )
        for p in sorted(self._wanted[node]):
            (rows,) = self.region.layouts[node]
            whole = self._sum if rows.kind is Kind.SUM else self._gather
            self._level[node] += 1
            self._whole[node, p] = self.joined[node] = whole(node, rows, p)
            self._level[node] -= 1

    def _in_whole(self, node: fx.Node) -> None:
        """A node that is not cut, on each shard that makes its value."""
        if "stage" not in node.meta:
            new = self._graph.node_copy(node, lambda n: self._whole[n, 0])
            self._whole.update({(node, p): new for p in self.every})
            return
        makers = sorted(self._wanted[node]) if node in self._spread else [0]
        for p in makers:
            reads = {n: self._whole[n, p] for n in node.all_input_nodes}
            operands = Operation.of(node).on(reads)
            self._whole[node, p] = self._add(node, operands, p, 1.0)
        if node not in self._spread:
            for p in self.every:
                self._whole[node, p] = self._whole[node, 0]

    def _read(self, node: fx.Node, read: fx.Node, p: int) -> fx.Node:
        """What a shard's call in the place of a node reads."""
        if not self._reads_whole(node, read):
            return self._parts[read, p]
        whole, rows = self._whole[read, p], self.region.calls[node].slices.get(read)
        if rows is None:
            return whole
        key = read, p, rows, self._level[node]
        if key not in self._slices:
            self._slices[key] = self._part(node, whole, rows, p)
        return self._slices[key]

    def _dropped(self, node: fx.Node, call: Operation, p: int) -> fx.Node:
        """Dropout of a part, by the same random numbers as of the whole value."""
        (rows,) = self.region.layouts[node]
        fake, named = value_of(node), "input" in call.kwargs
        x = call.kwargs["input"] if named else call.args[0]
        whole = tuple(map(int, fake.shape))
        options = {"dtype": fake.dtype, "device": fake.device}
        ones = self._make(node, torch.ones, (whole,), p, options)
        kwargs = {key: each for key, each in call.kwargs.items() if key != "input"}
        drop = call._replace(args=(ones, *call.args[1:]), kwargs=kwargs)
        kept = self._add(node, drop, p, 0.0)
        mine = self._part(node, kept, rows, p)
        mine = self._make(node, torch.clone, (mine,), p)  # so that B holds no more
        return self._make(node, torch.mul, (x, mine), p)

    def _part(self, node: fx.Node, whole: fx.Node, rows: Rows, p: int) -> fx.Node:
        """A shard's part of a value that it has all of."""
        dim, outer = rows.dim, rows.outer
        size = int(value_of(whole).shape[dim]) // (outer * len(self.every))
        if outer == 1:
            return self._make(node, torch.narrow, (whole, dim, p * size, size), p)
        sizes = (outer, len(self.every), size)
        blocks = self._make(node, torch.unflatten, (whole, dim, sizes), p)
        mine = self._make(node, torch.select, (blocks, dim + 1, p), p)
        return self._make(node, torch.flatten, (mine, dim, dim + 1), p)

    def _sum(self, node: fx.Node, rows: Rows, p: int) -> fx.Node:
        """The sum of what all shards have, in their order, and a bias that goes with
        it."""
        parts = [self._parts[node, q] for q in self.every]
        total = parts[0]
        for each in parts[1:]:
            total = self._make(node, torch.add, (total, each), p)
        bias = Operation.of(node).bias if node in self.region.unbiased else None
        if bias is None:
            return total
        added, shape = self._whole[bias, p], Operation.of(node).bias_shape
        if shape is not None:
            added = self._make(node, torch.reshape, (added, shape), p)
        kind = value_of(total).dtype
        if value_of(added).dtype != kind:  # as autocast takes it
            added = self._make(node, torch.Tensor.to, (added, kind), p)
        return self._make(node, torch.add, (total, added), p)

    def _gather(self, node: fx.Node, rows: Rows, p: int) -> fx.Node:
        """The parts of all shards as one value."""
        parts, dim = [self._parts[node, q] for q in self.every], rows.dim
        if rows.outer == 1:
            return self._make(node, torch.cat, (parts, dim), p)
        size = int(value_of(parts[0]).shape[dim]) // rows.outer
        blocks = [
            self._make(node, torch.unflatten, (each, dim, (rows.outer, size)), p)
            for each in parts
        ]
        joined = self._make(node, torch.cat, (blocks, dim + 1), p)
        return self._make(node, torch.flatten, (joined, dim, dim + 1), p)

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
        new.meta.update(work=_work(new), random=0, numbers=range(0), mutates=())
        return new

    def _add(self, node: fx.Node, call: Operation, p: int, share: float) -> fx.Node:
        """A node's call on a shard, which has a share of its work."""
        new = self._graph.create_node(
            call.op, call.target, call.args, call.kwargs, name=node.name
        )
        reads = new.all_input_nodes
        work = Work(*(share * each for each in node.meta["work"]))
        new.meta = {
            **node.meta,
            "shard": p,
            "level": self._level[node],
            "val": value_of(node) if self._is_same(node, call) else None,
            "work": work._replace(flops=int(work.flops), held=int(work.held)),
            "numbers": self._numbers[node],
            "mutates": _mutated(node, reads) if writes_operand(node) else (),
        }
        if node.meta.get("joint"):  # what it reads has the shapes that it had
            new.meta["val"] = value_of(node)
        elif new.meta["val"] is None:
            args, kwargs = fx.map_arg((call.args, call.kwargs), value_of)
            new.meta["val"] = self.follower.run(call, args, kwargs)
        return new

    def _is_same(self, node: fx.Node, call: Operation) -> bool:
        """Whether a call reads what the node does, as it is."""
        reads, pairs = node.all_input_nodes, call.reads
        return (
            call.target is node.target
            and len(reads) == len(pairs)
            and all(
                value_of(a) is value_of(b) for a, b in zip(reads, pairs, strict=True)
            )
        )


def _work(node: fx.Node) -> Work:
    values = list(tensors(value_of(node)))
    if node.target in (torch.narrow, torch.unflatten, torch.select):
        return Work(0, 0.0, 0.0, 0)
    return copied(values[0])


def _mutated(node: fx.Node, reads: Sequence[fx.Node]) -> tuple[Tensor, ...]:
    """What a node writes into, among what its copy reads."""
    written = {storage(t) for t in node.meta["mutates"]}
    pairs = zip(node.all_input_nodes, reads, strict=True)
    return tuple(
        value_of(new)
        for old, new in pairs
        if any(storage(t) in written for t in tensors(value_of(old)))
    )


def _numbered_draws(nodes: Sequence[fx.Node]) -> dict[fx.Node, range]:
    """The numbers of each node's draws in the model, as all shards draw them."""
    numbers, count = {}, 0
    for node in nodes:
        more = node.meta.get("random", 0)
        numbers[node] = range(count, count + more)
        count += more
    return numbers
