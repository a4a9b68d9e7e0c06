"""Cuts stages into shards, which exchange nothing but sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from ..ir.facts import FACTS, facts
from ..ir.graphs import REGION_ENTERS, REGION_EXITS, Output
from ..ir.lazy import lazy_module
from ..ir.parts import PartOf
from ..ir.request import Request
from ..jobs.job import Piece, PlanError
from ..jobs.shards import in_pieces
from ..sharding.attention import open_attention
from ..sharding.choice import choose_region
from ..sharding.layouts import Follower
from ..sharding.multihead import open_multihead
from ..sharding.named import named_region
from ..sharding.region import Grower, Region, in_flow
from ..sharding.rewrite import Rewriter
from ..sharding.trial import try_shards


def shard_stages(gm: fx.GraphModule, request: Request) -> fx.GraphModule:
    """Gives each shard of a stage its parts of the weights, and what it does with them.

    before: y = gelu(linear(x, w, b))        # stage 1
            z = linear(y, v, c)
    after:  y_0 = gelu(linear(x, w_0, b_0))  # stage 1, shard 0
            z_0 = linear(y_0, v_0)
            y_1 = gelu(linear(x, w_1, b_1))  # stage 1, shard 1
            z_1 = linear(y_1, v_1)
            z = z_0 + z_1 + c                # stage 1, shard 0

    Weights are cut where all that comes of them ends in sums (sharding/choice.py).
    What is not cut is on shard 0; what follows a sum is on all shards that go on with
    it, if it is cheap, such as norms. A stage's shards are cut into pieces where they
    read each other's values; pieces are the stages from now on, in facts(gm).schedule.
    Small models are tried on random numbers, whole and cut. Raises PlanError where no
    weight can be cut.
    """
    schedule = facts(gm).schedule or request.schedule
    if schedule.shards == 1:
        _check_kept(gm, request, Region({}))
        return gm
    _drop_dead(gm.graph)
    model, calls = gm, open_multihead(gm)
    gm, inside = open_attention(calls.gm)
    grower = Grower(gm, Follower(gm, schedule.shards), _kept_whole(request))
    region = (
        choose_region(grower, grower.nodes)
        if request.shards == "auto"
        else named_region(grower, grower.nodes, dict(request.shards))
    )
    _check_kept(gm, request, region)
    if not region.weights:
        raise PlanError(
            f"Schedule(shards={schedule.shards}): no weight can be cut into "
            f"{schedule.shards} equal parts whose products come to sums; give a model "
            "whose heads and hidden layers divide, or a schedule without shards"
        )
    rewriter = Rewriter(grower, region, request)
    graph = rewriter.graph()
    pieces = _number(graph)
    parts = rewriter.inputs
    known = replace(
        facts(gm),
        schedule=in_pieces(schedule, pieces),
        pieces=pieces,
        parts=parts,
        cuts=tuple(grower.told(region)),
        outputs=tuple(_with_parts(output, parts) for output in facts(gm).outputs),
    )
    whole = lazy_module(gm, graph, "Shards")
    whole.meta[FACTS] = known
    try_shards(model, whole, _through((inside, calls.origins), rewriter.joined))
    return whole


def _through(
    origins: Sequence[Mapping[fx.Node, fx.Node]], new: Mapping[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """What is there for nodes, by what these were before others were written out."""
    for each in origins:
        new = {each[node]: value for node, value in new.items() if node in each}
    return dict(new)


def _kept_whole(request: Request) -> set[int]:
    """Positions of weights that ranks keep whole since an earlier plan."""
    return request.owners.keys() - request.cuts.keys()


def _check_kept(gm: fx.GraphModule, request: Request, region: Region) -> None:
    """Raises PlanError for weights that ranks have in parts, and that aren't cut so."""
    for node in gm.graph.find_nodes(op="placeholder"):
        kept = request.cuts.get(node.meta["index"])
        rows = region.weights.get(node)
        if kept is None or (
            rows is not None and (rows.dim, rows.outer) == kept.cut[:2]
        ):
            continue
        raise PlanError(
            f"ranks have {node.meta['name']} in {kept.cut.parts} parts since an "
            "earlier call, and this one can't be cut so; give all backends of a model "
            "the same shards, and call it in training mode first"
        )


def _drop_dead(graph: fx.Graph) -> None:
    """Takes out what is made for nothing, which is in no stage."""
    for node in reversed(in_flow(graph.nodes)):
        bounds = node.target in (*REGION_ENTERS, *REGION_EXITS)
        called = node.op.startswith("call") and "stage" not in node.meta
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
        node: (node.meta["stage"], node.meta["level"], node.meta["shard"])
        for node in graph.nodes
        if "shard" in node.meta
    }
    order = sorted(set(place.values()))
    first = {s: k for s, k, _ in reversed(order)}
    pieces = [Piece(i, s, p, k - first[s]) for i, (s, k, p) in enumerate(order)]
    at = dict(zip(order, pieces, strict=True))
    for node, key in place.items():
        node.meta["stage"] = at[key]
    return tuple(pieces)
