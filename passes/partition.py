"""Gives every node of the traced graph a stage."""

from __future__ import annotations

import difflib
import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import networkx as nx
from torch import Tensor, fx

from ..graphs import REGION_ENTERS, REGION_EXITS, Role, storage, tensors
from ..jobs import PlanError
from ..request import Request

# A stage holds parallel branches if two unconnected parts of it are heavier than this
# share of an average stage; lighter ones (masks, embeddings) may go anywhere.
BRANCH = 0.05
# Cuts may make the slowest stage this much slower if fewer bytes cross them.
SLACK = 1.05

Block = list[fx.Node]


def assign_stages(gm: fx.GraphModule, request: Request) -> fx.GraphModule:
    """Cuts the graph into stages, in an order that values only flow forward in.

    before: code = code_encoder(x); doc = doc_encoder(y); logit = head(code, doc)
    after:  the same nodes, each with meta["stage"]: 0 for the one encoder, 1 for the
            other and the head; unused nodes have none

    "auto": as many stages as the schedule says; no parallel branches in one stage if
    there are enough stages, then the least FLOPs in the heaviest stage, then the
    fewest bytes across cuts. Names: each named module starts a new stage, in the order
    of the program.
    Raises PlanError for more stages than there are places to cut, unknown names, and
    inputs that the model writes into.
    """
    blocks = _blocks(gm)
    if request.stages == "auto":
        schedule = request.schedule
        ordered = _depth_first(gm, blocks)
        cuts = _cut(ordered, schedule.stages, schedule.workers)
    else:
        ordered = blocks
        cuts = _named_cuts(ordered, tuple(request.stages), request.schedule.stages)
    for stage, (start, end) in enumerate(zip([0, *cuts], [*cuts, None], strict=True)):
        for block in ordered[start:end]:
            for node in block:
                node.meta["stage"] = stage
    gm.meta["stage_count"] = len(cuts) + 1
    return gm


def _blocks(gm: fx.GraphModule) -> list[Block]:
    """Nodes that cannot be told apart by a cut, in program order.

    They are the readers of a tuple with its maker, and a tensor that is written into
    with everything that reads or writes it up to the last write.
    """
    nodes = [n for n in gm.graph.nodes if n.op.startswith("call")]
    nodes = [n for n in nodes if n.target not in (*REGION_ENTERS, *REGION_EXITS)]
    tied = [[n, *n.users] for n in nodes if not isinstance(n.meta["val"], Tensor)]
    tied += _written(gm, nodes)
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
    last: dict[int, int] = {}
    for i, node in enumerate(nodes):
        for tensor in node.meta["mutates"]:
            last[storage(tensor)] = i
    inputs: dict[int, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            inputs[storage(node.meta["val"])] = node
    groups = []
    for written, end in last.items():
        given = inputs.get(written)
        if given is not None and given.meta["role"] is not Role.BUFFER:
            line = (nodes[end].meta["stack_trace"] or "").strip().split("\n")
            raise PlanError(
                f"the model writes into its input {given.meta['name']}, at\n  "
                + "\n  ".join(line[-2:])
                + "\nmicrobatches would not see each other's writes; write into a copy"
            )
        stop = len(nodes) if given is not None else end + 1
        groups.append([n for n in nodes[:stop] if _touches(n, written)])
    return groups


def _touches(node: fx.Node, written: int) -> bool:
    values = [node.meta["val"], *(n.meta.get("val") for n in node.all_input_nodes)]
    return any(storage(t) == written for value in values for t in tensors(value))


def _find(parent: list[int], a: int) -> int:
    while parent[a] != a:
        parent[a] = parent[parent[a]]
        a = parent[a]
    return a


def _cost(block: Block) -> int:
    """FLOPs, and one for every number that a node makes."""
    made = sum(t.numel() for n in block for t in tensors(n.meta["val"]))
    return made + sum(int(n.meta["flops"]) for n in block)


def _depth_first(gm: fx.GraphModule, blocks: list[Block]) -> list[Block]:
    """Blocks in an order of data flow that finishes one branch before the next.

    The branch with the longest path of work comes first. Blocks that nothing reads
    are left out, but for those that write into buffers.
    """
    of = {node: i for i, block in enumerate(blocks) for node in block}
    preds = [
        sorted({of[p] for n in block for p in n.all_input_nodes if p in of} - {i})
        for i, block in enumerate(blocks)
    ]
    depth: list[int] = []
    for i, block in enumerate(blocks):
        depth.append(_cost(block) + max((depth[p] for p in preds[i]), default=0))
    order: list[int] = []
    roots = {of[n] for n in gm.graph.output_node().all_input_nodes if n in of}
    for root in sorted(roots, key=lambda i: (-depth[i], i)):
        order += _ancestors(root, preds, depth, set(order))
    for i, block in enumerate(blocks):
        if i not in order and _writes_buffer(block):  # beside what stands before it
            chain = _ancestors(i, preds, depth, set(order))
            near = {p for j in chain for p in preds[j]} | {
                max([j for j in order if j < i] or [-1])
            }
            at = max((order.index(p) for p in near if p in order), default=-1) + 1
            order[at:at] = chain
    return [blocks[i] for i in order]


def _ancestors(
    root: int, preds: list[list[int]], depth: list[int], seen: set[int]
) -> list[int]:
    """A block after all that it needs and isn't seen, deepest branches first."""
    order: list[int] = []
    stack = [(root, False)]
    while stack:
        i, done = stack.pop()
        if done:
            order.append(i)
        elif i not in seen:
            seen.add(i)
            stack.append((i, True))
            ahead = sorted(preds[i], key=lambda p: (depth[p], -p))
            stack += [(p, False) for p in ahead if p not in seen]
    return order


def _writes_buffer(block: Block) -> bool:
    given = {
        storage(p.meta["val"])
        for n in block
        for p in n.all_input_nodes
        if p.op == "placeholder"
    }
    return any(storage(t) in given for n in block for t in n.meta["mutates"])


class Unit(NamedTuple):
    """Neighbouring blocks with one cut after them: one heavy block and light ones."""

    end: int  # blocks up to here
    cost: int
    bytes: int  # that cross the cut
    preds: tuple[int, ...]  # units that it reads


def _cut(blocks: list[Block], stages: int | None, workers: int) -> list[int]:
    """Where to cut: for each stage but the last, the number of blocks up to its end."""
    wanted = stages or min(workers, max(len(blocks), 1))
    if wanted > len(blocks):
        raise PlanError(
            f"the schedule wants {wanted} stages, but the model can be cut into "
            f"{len(blocks)} at most; use Schedule(stages={max(len(blocks), 1)}) or less"
        )
    units = _units(blocks, wanted)
    apart = _branches(units, wanted)
    if max(map(max, apart)) >= wanted:  # more branches than stages: some must share
        apart = [[0] * len(row) for row in apart]
    worst = _best(units, wanted, apart, None)[0][1]
    _, ends = _best(units, wanted, apart, worst * SLACK)
    return [units[i - 1].end for i in ends]


def _units(blocks: list[Block], stages: int) -> list[Unit]:
    costs = [_cost(block) for block in blocks]
    flops = [sum(int(n.meta["flops"]) for n in block) for block in blocks]
    threshold = max(sum(flops) / (50 * stages), 1)
    heavy = [i for i, count in enumerate(flops) if count >= threshold]
    if len(heavy) < stages:
        heavy = list(range(len(blocks)))
    crossing = _crossing(blocks)
    ends = [_end(blocks, i, j, crossing) for i, j in itertools.pairwise(heavy)]
    ends.append(len(blocks))
    unit_of = {}
    units: list[Unit] = []
    start = 0
    for number, end in enumerate(ends):
        inside = [node for block in blocks[start:end] for node in block]
        unit_of.update(dict.fromkeys(inside, number))
        preds = {unit_of[p] for n in inside for p in n.all_input_nodes if p in unit_of}
        cost = sum(costs[start:end])
        units.append(Unit(end, cost, crossing[end], tuple(preds - {number})))
        start = end
    return units


def _end(blocks: list[Block], heavy: int, following: int, crossing: list[int]) -> int:
    """Where to cut between two heavy blocks: where the fewest bytes cross.

    Of equal places the one after all light blocks that read the first heavy one alone;
    what joins branches, or starts another one, belongs to the next.
    """
    inside = set(blocks[heavy])
    limit = heavy + 1
    for block in blocks[heavy + 1 : following]:
        read = {p for n in block for p in n.all_input_nodes if "flops" in p.meta}
        if not read or not read <= inside | set(block):
            break
        inside.update(block)
        limit += 1
    places = range(heavy + 1, following + 1)
    return min(places, key=lambda end: (crossing[end], abs(end - limit)))


def _crossing(blocks: list[Block]) -> list[int]:
    """For each cut, the bytes of tensors that are made before and read after it."""
    at = {node: i for i, block in enumerate(blocks) for node in block}
    change = [0] * (len(blocks) + 2)
    for node, made in at.items():
        last = max((at.get(user, made) for user in node.users), default=made)
        size = sum(t.numel() * t.element_size() for t in tensors(node.meta["val"]))
        change[made + 1] += size
        change[last + 1] -= size
    for i in range(1, len(change)):
        change[i] += change[i - 1]
    return change


def _branches(units: list[Unit], stages: int) -> list[list[int]]:
    """apart[i][j]: heavy unconnected parts in a stage of units i to j, less one."""
    heavy = BRANCH * sum(unit.cost for unit in units) / stages
    table = []
    for i in range(len(units)):
        parent = list(range(len(units)))
        weight: dict[int, int] = {}
        row = [0] * (i + 1)
        count = 0
        for j in range(i, len(units)):
            merged, cost = {j}, units[j].cost
            merged |= {_find(parent, p) for p in units[j].preds if p >= i}
            for root in merged - {j}:
                count -= weight[root] >= heavy
                cost += weight.pop(root)
                parent[root] = j
            weight[j] = cost
            count += cost >= heavy
            row.append(max(count - 1, 0))
        table.append(row)
    return table


def _best(
    units: list[Unit], stages: int, apart: list[list[int]], limit: float | None
) -> tuple[tuple[int, float], list[int]]:
    """The best cuts by dynamic programming over units; (its value, units up to each).

    The value is (branches that share a stage, cost of the heaviest stage), or, for
    stages of a cost up to `limit`, (branches that share a stage, bytes across cuts).
    """
    sums = [0]
    for unit in units:
        sums.append(sums[-1] + unit.cost)
    count = len(units)
    best: list[tuple[int, float] | None] = [(0, 0.0)] + [None] * count
    choices: list[list[int]] = []
    for _ in range(stages):
        row: list[tuple[int, float] | None] = [None] * (count + 1)
        choice = [0] * (count + 1)
        for i in range(count):
            before = best[i]
            if before is None:
                continue
            for j in range(i + 1, count + 1):
                cost = sums[j] - sums[i]
                if limit is not None and cost > limit:
                    break
                second = (
                    max(before[1], float(cost))
                    if limit is None
                    else before[1] + (units[j - 1].bytes if j < count else 0)
                )
                value = (before[0] + apart[i][j], second)
                old = row[j]
                if old is None or value < old:
                    row[j], choice[j] = value, i
        best = row
        choices.append(choice)
    final = best[count]
    assert final is not None, "no cut within the limit that a cut was found for"
    ends, j = [], count
    for choice in reversed(choices):
        j = choice[j]
        ends.append(j)
    return final, sorted(ends)[1:]


def _named_cuts(
    blocks: list[Block], names: Sequence[str], stages: int | None
) -> list[int]:
    """Where the named modules start, in program order."""
    modules = [{str(n.meta["module"]) for n in block} for block in blocks]
    starts = {}
    for name in names:
        inside = [
            any(m == name or m.startswith(name + ".") for m in found)
            for found in modules
        ]
        if not any(inside):
            known = {
                ".".join(m.split(".")[: i + 1])
                for f in modules
                for m in f
                for i in range(len(m.split(".")))
            } - {""}
            near = difflib.get_close_matches(name, sorted(known), 3) or sorted(known)
            raise PlanError(
                f"stages names module {name!r}, which the model doesn't call; "
                f"did you mean {', '.join(near[:3])}?"
            )
        starts[name] = operator.indexOf(inside, True)
    cuts = sorted(set(starts.values()) - {0})
    if stages is not None and len(cuts) + 1 != stages:
        raise PlanError(
            f"stages names {len(names)} modules, which makes {len(cuts) + 1} stages, "
            f"but the schedule has {stages}; name as many as it has, where the first "
            "stage may start unnamed"
        )
    return cuts
