"""Gives every node of the traced graph a stage."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import networkx as nx
from torch import Tensor, fx

from ..ir.boundary import BOUNDARY
from ..ir.facts import FACTS, facts
from ..ir.graphs import (
    REGION_ENTERS,
    REGION_EXITS,
    Role,
    storage,
    tensors,
    written_storages,
)
from ..ir.meta import of_node
from ..ir.request import Request
from ..ir.user_line import user_line
from ..ir.writes import touching
from ..jobs.job import PlanError
from ..partition.planner import choose_cut, stage_graph
from .best_stages import best_stages, best_within, pinned_stages
from .cut_problem import (
    Block,
    cut_problem,
    in_shards,
    named_cut,
    nodes_inside,
    send_time,
)
from .gradient_order import has_gaps
from .joint_stages import Fitted, stages_with_joint
from .recompute import again_text
from .recompute_within import fit_within


def assign_stages(gm: fx.GraphModule, request: Request) -> fx.GraphModule:
    """Cuts the graph into stages, in an order that values only flow forward in.

    before: code = code_encoder(x); doc = doc_encoder(y); logit = head(code, doc)
    after:  the same nodes, each with meta["stage"]: 0 and 1 for the encoders, 2 for
            the head; unused nodes have none

    "auto": the cut whose step the schedule should take the shortest (planner.py).
    Names: each named module starts a new stage, in the order of the program.
    facts(gm).schedule is the schedule for these stages. What is cheaper to compute
    again than to send, such as a mask, gets no stage here.
    Raises PlanError for more stages than there are places to cut, unknown names, a
    memory limit that no cut meets, and inputs that the model writes into.
    """
    if facts(gm).schedule is not None:  # since the trace was chosen
        return gm
    shared = _shared(gm, request)
    blocks = _used(gm, _blocks(gm, request, shared))
    if len(blocks) < (request.schedule.stages or 1):  # nothing but cheap values
        shared = set()
        blocks = _used(gm, _blocks(gm, request, shared))
    if request.carry == "auto" and request.memory_limit and request.training:
        fit = partial(_fit, blocks)
        if request.schedule.candidates and request.stages == "auto":
            fitted = best_within(blocks, request, fit)
        else:
            nodes = [node for block in blocks for node in block]
            fitted = fit_within(nodes, request, fit)
    else:
        fitted = _fit(blocks, request)
    known = replace(facts(gm), **fitted._asdict(), again=again_text(gm.graph.nodes))
    gm.meta[FACTS] = known
    return gm


def _fit(blocks: list[Block], request: Request) -> Fitted:
    """Gives every node of the blocks a stage."""
    if request.schedule.cut is not None:
        return pinned_stages(blocks, request)
    if request.schedule.candidates and request.stages == "auto":
        return best_stages(blocks, request, partial(_fit, blocks))
    if any(of_node(node).get("joint") for block in blocks for node in block):
        return stages_with_joint(blocks, request)
    problem = in_shards(cut_problem(blocks, request), request.schedule.shards)
    if request.stages == "auto":
        choice = choose_cut(problem, request.schedule, request.memory_limit)
        cut, schedule = choice.cut, choice.schedule
        stages = stage_graph(problem, cut)
    else:
        cut = named_cut(problem, blocks, request)
        stages = stage_graph(problem, cut)
        schedule = request.schedule.fitted(stages)
    for block, stage in zip(blocks, cut, strict=True):
        for node in block:
            of_node(node)["stage"] = stage
    return Fitted(schedule, stages)


def _shared(gm: fx.GraphModule, request: Request) -> set[fx.Node]:
    """What each reader computes from the inputs for less than it takes to be sent."""
    seconds: dict[fx.Node, dict[fx.Node, float]] = {}  # of all that a node comes from
    written = written_storages(gm.graph)
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            parameter = of_node(node).get("role") is Role.PARAMETER
            if not parameter and not _among(node, written):
                seconds[node] = {}
        elif (
            node.op.startswith("call") and not _meets(node) and _repeats(node, written)
        ):
            read = node.all_input_nodes
            if all(p in seconds for p in read):
                whole = {n: s for p in read for n, s in seconds[p].items()}
                whole[node] = of_node(node)["work"].forward
                if sum(whole.values()) <= send_time(node, request):
                    seconds[node] = whole
    return {node for node in seconds if node.op.startswith("call")}


def _meets(node: fx.Node) -> bool:
    """Whether a node is of the whole batch, or read by one."""
    return any(of_node(n).get("joint") for n in (node, *node.users))


def _among(node: fx.Node, written: set[int]) -> bool:
    return any(storage(t) in written for t in tensors(of_node(node).get("val")))


def _repeats(node: fx.Node, written: set[int]) -> bool:
    """Whether a node may run twice: it draws and learns nothing, nothing is written."""
    regions = node.target in (*REGION_ENTERS, *REGION_EXITS)
    return not (
        regions
        or of_node(node)["random"]
        or _among(node, written)
        or any(t.requires_grad for t in tensors(of_node(node)["val"]))
    )


def _blocks(gm: fx.GraphModule, request: Request, shared: set[fx.Node]) -> list[Block]:
    """Nodes that cannot be told apart by a cut, in program order.

    They are the readers of a tuple with its maker, a tensor that is written into with
    everything that reads or writes it up to the last write, modules of one group of
    same_stage with all that lies between them, and what a message would give another
    layout with its readers, where deterministic=True leaves the choice of the cut.
    """
    nodes = [n for n in gm.graph.nodes if n.op.startswith("call")]
    nodes = [n for n in nodes if n.target not in (*REGION_ENTERS, *REGION_EXITS)]
    nodes = [n for n in nodes if n not in shared]
    tied = [[n, *n.users] for n in nodes if not isinstance(of_node(n)["val"], Tensor)]
    tied += [[*n.all_input_nodes, n] for n in nodes if n.target is BOUNDARY]
    tied += _written(gm, nodes)
    tied += _counters(nodes)
    if request.deterministic and request.training and request.stages == "auto":
        tied += [[n, *n.users] for n in nodes if has_gaps(n)]
    tied += [
        [n for name in names for n in nodes_inside(nodes, name, "same_stage")]
        for names in request.same_stage
    ]
    position = {node: i for i, node in enumerate(nodes)}
    flow: nx.DiGraph[fx.Node] = nx.DiGraph()
    flow.add_nodes_from(nodes)
    flow.add_edges_from((p, n) for n in nodes for p in n.all_input_nodes if p in flow)
    for group in tied:  # a cycle through its members keeps a group together
        members = [n for n in group if n in flow]
        flow.add_edges_from(zip(members, members[1:] + members[:1], strict=True))
    whole = nx.condensation(flow)
    blocks: list[Block] = [
        sorted(whole.nodes[i]["members"], key=position.__getitem__) for i in whole
    ]
    order = nx.lexicographical_topological_sort(
        whole, key=lambda i: position[blocks[i][0]]
    )
    return [blocks[i] for i in order]


def _written(gm: fx.GraphModule, nodes: list[fx.Node]) -> list[Block]:
    """For each storage that the graph writes into, the nodes up to the last write."""
    inputs = gm.graph.find_nodes(op="placeholder")
    found = touching([*inputs, *nodes])
    for source in inputs:
        place = storage(of_node(source)["val"])
        if place in found and of_node(source)["role"] is not Role.BUFFER:
            writers = [n for n in found[place] if _writes(n, place)]
            line = user_line(writers[-1].meta["stack_trace"])
            role = of_node(source)["role"]
            name, kind = of_node(source)["name"], "parameter"
            remedy = "write into a copy"
            if role is not Role.PARAMETER:
                kind = "input"
                remedy += f", or pass {name}.clone() to the model in a module around it"
            raise PlanError(
                f"the model writes into its {kind} {name}, at\n  {line}\n"
                f"microbatches would not see each other's writes; {remedy}"
            )
    return list(found.values())


def _writes(node: fx.Node, place: int) -> bool:
    return place in map(storage, of_node(node)["mutates"])


def _counters(nodes: list[fx.Node]) -> list[Block]:
    """Writes that read nothing of other nodes, such as a BatchNorm's count of batches,
    with the next node of their module."""
    inside = set(nodes)
    counters = []
    for i, node in enumerate(nodes):
        if of_node(node)["mutates"] and not inside.intersection(node.all_input_nodes):
            module = of_node(node)["module"]
            rest = (n for n in nodes[i + 1 :] if of_node(n)["module"] == module)
            counters.append([node, next(rest, node)])
    return counters


def _used(gm: fx.GraphModule, blocks: list[Block]) -> list[Block]:
    """Without blocks that nothing reads, but for those that write into buffers."""
    of = {node: i for i, block in enumerate(blocks) for node in block}
    needed = {of[n] for n in gm.graph.output_node().all_input_nodes if n in of}
    needed |= {i for i, block in enumerate(blocks) if _writes_buffer(block)}
    for i in reversed(range(len(blocks))):
        if i in needed:
            needed |= {of[p] for n in blocks[i] for p in n.all_input_nodes if p in of}
    return [block for i, block in enumerate(blocks) if i in needed]


def _writes_buffer(block: Block) -> bool:
    inputs = {
        storage(of_node(p)["val"])
        for n in block
        for p in n.all_input_nodes
        if p.op == "placeholder"
    }
    return any(storage(t) in inputs for n in block for t in of_node(n)["mutates"])
