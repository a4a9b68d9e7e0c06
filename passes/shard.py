"""Cuts stages into shards, which exchange nothing but sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import fx

from ..checker.check_shards import try_shards
from ..ir.facts import FACTS, facts
from ..ir.graphs import REGION_ENTERS, REGION_EXITS, Output
from ..ir.lazy import lazy_module
from ..ir.meta import of_node
from ..ir.parts import PartOf, bytes_of_parts
from ..ir.request import Request
from ..ir.user_line import line_of
from ..jobs.job import Piece, PlanError
from ..jobs.schedule import Schedule
from ..jobs.shards import in_pieces
from ..partition.planner import fastest, predict
from ..placement.choice import choose_regions, named_region
from ..placement.layouts import in_flow, where
from ..placement.own_rows import RowFollower
from ..placement.propagation import Propagation
from ..placement.region import Region
from ..placement.slices import slices_text, variants
from .cut_problem import cut_problem
from .open_attention import open_attention
from .shard_graph import Rewriter

# Seconds of a worker's core for a job with its messages, which simulating leaves out.
JOB = 5e-5


def shard_stages(gm: fx.GraphModule, request: Request) -> fx.GraphModule:
    """Gives each shard of a stage its parts of the weights, and what it does with them.

    before: y = gelu(linear(x, w, b))        # stage 1
            z = linear(y, v, c)
    after:  y_0 = gelu(linear(x, w_0, b_0))  # stage 1, shard 0
            z_0 = linear(y_0, v_0)
            y_1 = gelu(linear(x, w_1, b_1))  # stage 1, shard 1
            z_1 = linear(y_1, v_1)
            z = z_0 + z_1 + c                # stage 1, shard 0

    Weights are cut where all that comes of them ends in sums (placement/choice.py).
    What is not cut is on shard 0; what follows a sum is on all shards that go on with
    it, if it is cheap, such as norms. A stage's shards are cut into pieces where they
    read each other's values; pieces are the stages from now on, in facts(gm).schedule.
    Of the ways to do it, the one that should be the fastest within the memory limit is
    taken. Small models are tried on random numbers, whole and cut. Raises PlanError
    where no weight can be cut.
    """
    schedule = facts(gm).schedule or request.schedule
    if schedule.shards == 1:
        _check_kept(gm, request, Region({}))
        return gm
    _drop_dead(gm.graph)
    model, (gm, inside) = gm, open_attention(gm, request.device)
    propagation = Propagation(
        gm, RowFollower(gm, schedule.shards), _kept_whole(gm, request)
    )
    ways = [
        _Way.of(region, Rewriter(propagation, each, request), schedule)
        for region in _regions(gm, propagation, request)
        for each in variants(propagation, region, _slices(request))
    ]
    best = _fastest(ways, request)
    parts = best.rewriter.inputs
    known = replace(
        facts(gm),
        schedule=best.schedule,
        pieces=best.pieces,
        parts=parts,
        cuts=tuple(propagation.told(best.region)),
        sliced=slices_text(best.rewriter.region, best.region),
        whole=model,
        outputs=tuple(_with_parts(output, parts) for output in facts(gm).outputs),
    )
    whole = lazy_module(gm, best.graph, "Shards")
    whole.meta[FACTS] = known
    joined = best.rewriter.joined.items()
    try_shards(model, whole, {inside[n]: new for n, new in joined if n in inside})
    return whole


def _regions(
    gm: fx.GraphModule, propagation: Propagation, request: Request
) -> list[Region]:
    """The regions that may run in parts, the fastest first."""
    words = () if request.shards == "auto" else request.shards
    weights = {name: word for name, word in words if word != "sequence"}
    regions = (
        [named_region(propagation, propagation.nodes, weights)]
        if weights
        else choose_regions(propagation, propagation.nodes, request)
    )
    some = [region for region in regions if region.weights]
    if not some:
        shards = propagation.follower.shards
        why = [
            f" ({of_node(w)['name']}: {why})" for w, why in propagation.reasons.items()
        ]
        raise PlanError(
            f"Schedule(shards={shards}): no weight can be cut into {shards} equal "
            "parts so that the shards' results add up to the "
            f"model's{''.join(why[:1])}; give a model whose heads and hidden layers "
            "divide, or a schedule without shards"
        )
    if request.memory_limit is None:
        del some[1:]
    for region in some:
        _check_kept(gm, request, region)
        _check_exact(request, region)
    return some


def _slices(request: Request) -> list[str] | None:
    """Patterns of names of modules whose norms and the like are to be in slices; None
    where these aren't named."""
    if request.shards == "auto":
        return None
    return [name for name, word in request.shards if word == "sequence"]


class _Way(NamedTuple):
    """A way to run shards of a region: their graph, the pieces that it is cut into, and
    a schedule of these."""

    region: Region
    rewriter: Rewriter
    graph: fx.Graph
    pieces: tuple[Piece, ...]
    schedule: Schedule

    @staticmethod
    def of(region: Region, rewriter: Rewriter, schedule: Schedule) -> _Way:
        graph = rewriter.graph()
        pieces = _number(graph)
        return _Way(region, rewriter, graph, pieces, in_pieces(schedule, pieces))


def _fastest(ways: Sequence[_Way], request: Request) -> _Way:
    """The way whose step should be the shortest, of those within the memory limit."""
    if request.memory_limit is None and len(ways) == 1:
        return ways[0]
    choices = []
    for way in ways:
        blocks: list[list[fx.Node]] = [[] for _ in way.pieces]
        for node in way.graph.nodes:
            if "shard" in of_node(node):
                blocks[of_node(node)["stage"]].append(node)
        sizes = bytes_of_parts(request.state_bytes, way.rewriter.inputs)
        problem = cut_problem(blocks, replace(request, state_bytes=sizes))
        choice = predict(problem, way.schedule, request.memory_limit)
        jobs = 2 * way.schedule.microbatches * len(blocks) / way.schedule.workers
        choices.append(choice._replace(seconds=choice.seconds + JOB * jobs))
    within = fastest(choices, request.memory_limit)
    return ways[choices.index(within)]


def _kept_whole(gm: fx.GraphModule, request: Request) -> set[int]:
    """Positions of weights that ranks keep whole since an earlier plan, and of state
    that the model writes."""
    written = {o.state for o in facts(gm).outputs if o.state is not None}
    return written | (request.owners.keys() - request.cuts.keys())


def _check_kept(gm: fx.GraphModule, request: Request, region: Region) -> None:
    """Raises PlanError for weights that ranks have in parts, and that aren't cut so."""
    for node in gm.graph.find_nodes(op="placeholder"):
        kept = request.cuts.get(of_node(node)["index"])
        rows = region.weights.get(node)
        if kept is None or (
            rows is not None and (rows.dim, rows.outer) == kept.cut[:2]
        ):
            continue
        raise PlanError(
            f"ranks have {of_node(node)['name']} in {kept.cut.parts} parts since an "
            "earlier call, and this call's plan can't cut it in this way; give all "
            "backends of a model the same shards, and call it in training mode first"
        )


def _check_exact(request: Request, region: Region) -> None:
    """Raises PlanError where numbers that a loss is made of would be rounded."""
    if request.encode.activations is None or not region.joined:
        return
    node = min(region.joined, key=str)
    raise PlanError(
        f"shards={{..}}: encode={{'activations': ..}} would round numbers "
        f"that {where(node)} reads, since its logits are cut into "
        f"shards{line_of(node.meta.get('stack_trace'))}\nleave "
        "'activations' out of encode=, or leave shards= out"
    )


def _drop_dead(graph: fx.Graph) -> None:
    """Takes out what is made for nothing, which is in no stage."""
    for node in reversed(in_flow(graph.nodes)):
        bounds = node.target in (*REGION_ENTERS, *REGION_EXITS)
        called = node.op.startswith("call") and "stage" not in of_node(node)
        if called and not (node.users or bounds):
            graph.erase_node(node)


def _with_parts(output: Output, parts: Mapping[int, PartOf]) -> Output:
    """An output, with the parts of weights among what its gradient reaches."""
    if output.leaves is None:
        return output
    reached = {i for i, part in parts.items() if part.input in output.leaves}
    return output._replace(leaves=output.leaves | reached)


def _number(graph: fx.Graph) -> tuple[Piece, ...]:
    """Gives nodes their pieces, in an order that values only flow forward in.

    A stage's pieces end where its shards read each other.
    """
    place = {
        node: (of_node(node)["stage"], of_node(node)["level"], of_node(node)["shard"])
        for node in graph.nodes
        if "shard" in of_node(node)
    }
    order = sorted(set(place.values()))
    first = {s: k for s, k, _ in reversed(order)}
    pieces = [Piece(i, s, p, k - first[s]) for i, (s, k, p) in enumerate(order)]
    at = dict(zip(order, pieces, strict=True))
    for node, key in place.items():
        of_node(node)["stage"] = at[key]
    return tuple(pieces)
