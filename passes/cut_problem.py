"""Blocks of nodes as what is to be cut, and stages that the user names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import fx

from ..ir.boundary import BOUNDARY
from ..ir.graphs import Role, module_prefixes, tensors
from ..ir.meta import of_node
from ..ir.request import Request
from ..jobs.job import PlanError, UnknownModule
from ..partition.costs import send_seconds
from ..partition.cut_cost import Cut, Hyperedge, Problem, Unit
from .recompute import Regions, marked, value_bytes

Block = list[fx.Node]
INSTANT = 1e-12  # seconds of a B that takes none, such as that of a sum


def send_time(node: fx.Node, request: Request) -> float:
    """Seconds to send what a node makes."""
    values = list(tensors(of_node(node)["val"]))
    if not values:
        return 0.0
    size = sum(t.nbytes for t in values)
    return send_seconds(size, values[0].device, request.link, request.device)


def cut_problem(blocks: list[Block], request: Request) -> Problem:
    """Blocks as units, what they make for others as hyperedges."""
    of = {node: i for i, block in enumerate(blocks) for node in block}
    regions = Regions(of, partial(_region, request.schedule.cut))
    known: set[fx.Node] = set()  # state that is counted already
    units, edges, apart = [], [], set()
    for i, block in enumerate(blocks):
        work = [of_node(node)["work"] for node in block]
        state = {p for n in block for p in n.all_input_nodes if _is_state(p)} - known
        known |= state
        gradients = sum(_gradient_bytes(p, request.gradient_dtype) for p in state)
        least = INSTANT * any(map(_has_gradient, block))
        units.append(
            Unit(
                sum(w.forward for w in work),
                max(sum(w.backward for w in work) + regions.again(block), least),
                regions.held(block),
                sum(of_node(p)["val"].nbytes for p in state) + gradients,
                gradients,
                sum(request.state_bytes.get(of_node(p)["index"], 0) for p in state),
                sum(send_time(p, request) for p in state),
                max((regions.temporary(node) for node in block), default=0),
            )
        )
        for node in block:
            readers = tuple(sorted({of[u] for u in node.users if u in of} - {i}))
            if readers:
                there = send_time(node, request)
                gradient = _has_gradient(node)
                edges.append(
                    Hyperedge(i, readers, there, there * gradient, value_bytes(node))
                )
            if node.target is BOUNDARY:
                apart |= {(i, reader) for reader in readers}
    return Problem(
        tuple(units),
        tuple(edges),
        rounds=0.0,
        apart=frozenset(apart),
        in_ring=request.sums_in_ring,
        recomputes=lambda stage: request.carries(stage) == "recompute",
    )


def _region(cut: Mapping[str, int] | None, node: fx.Node) -> object:
    """What B computes again at once; a region that is cut into stages is several."""
    region = marked(node)
    return region if region is None or cut is None else (cut.get(node.name), region)


def in_shards(problem: Problem, shards: int) -> Problem:
    """The same on one of so many shards, each with as much of every unit."""
    if shards == 1:
        return problem
    units = (Unit(*(each / shards for each in unit)) for unit in problem.units)
    return replace(problem, units=tuple(units))


def _has_gradient(node: fx.Node) -> bool:
    return any(t.requires_grad for t in tensors(of_node(node)["val"]))


def _is_state(node: fx.Node) -> bool:
    return of_node(node).get("role") in (Role.PARAMETER, Role.BUFFER)


def _gradient_bytes(node: fx.Node, dtype: torch.dtype | None) -> int:
    """Of a weight, in the type that its gradients are added up in."""
    value = of_node(node)["val"]
    size = (dtype or value.dtype).itemsize
    return int(value.numel() * size * value.requires_grad)


def nodes_inside(nodes: Sequence[fx.Node], name: str, option: str) -> list[fx.Node]:
    """The nodes of a module. Raises PlanError with the nearest names if it has none."""
    members = [
        n
        for n in nodes
        if of_node(n)["module"] == name or of_node(n)["module"].startswith(name + ".")
    ]
    if members:
        return members
    known = sorted({prefix for n in nodes for prefix in module_prefixes(n)})
    near = difflib.get_close_matches(name, known, 3) or known
    raise UnknownModule(
        f"{option} names module {name!r}, which the model doesn't call; "
        f"did you mean {', '.join(near[:3])}?"
    )


def named_cut(problem: Problem, blocks: list[Block], request: Request) -> Cut:
    """Stages that start where the named modules do, and after marks in the model, in
    program order."""
    names, stages = request.stages, request.schedule.stages
    of = {node: i for i, block in enumerate(blocks) for node in block}
    starts = {
        min(of[n] for n in nodes_inside(list(of), name, "stages")) for name in names
    }
    for marked_unit in {maker for maker, _ in problem.apart}:
        starts.add(min(r for maker, r in problem.apart if maker == marked_unit))
    starts.discard(0)
    if len(names) == stages == len(starts):
        starts.remove(min(starts))  # what comes before the first named module joins it
    if stages is not None and len(starts) + 1 != stages:
        raise PlanError(
            f"stages names {len(names)} modules, which makes {len(starts) + 1} stages, "
            f"but the schedule has {stages}; name as many as it has, where the first "
            "stage may start unnamed"
        )
    return tuple(sum(start <= i for start in starts) for i in range(len(blocks)))
