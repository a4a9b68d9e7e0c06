"""Finds blocks of a stage that repeat, such as the layers of a transformer, and cuts
the stage between them. A cut is only a saving: any that is made is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, fx

from ..ir.graphs import REGION_ENTERS, result, storage
from ..ir.lazy import lazy_module
from ..ir.meta import of_node
from ..ir.regions import CopiedRegions, is_region

SAVED = 16  # operations not traced that are worth a cut
PERIODS = 8  # lengths of a block that are tried


class Piece(NamedTuple):
    """A part of a stage: (state..., values...) -> outputs.

    module: its graph. nodes: the stage's node for each of the module's, None for those
    that have none. inputs: state that it reads, then values of others. state: how many
    of the inputs are state. outputs: what it gives to later pieces or to the caller.
    """

    module: fx.GraphModule
    nodes: tuple[fx.Node | None, ...]
    inputs: tuple[fx.Node, ...]
    state: int
    outputs: tuple[fx.Node, ...]


def equal_pieces(module: fx.GraphModule, state: int) -> list[Piece]:
    """The stage cut before, between and after blocks that repeat; nothing if there are
    none, or if its pieces could differ from the whole.

    state: how many of the module's arguments are weights and buffers.
    """
    work = [node for node in module.graph.nodes if _is_work(node)]
    cuts = _cuts(work)
    if not cuts:
        return []
    bounds = dict.fromkeys((0, *cuts, len(work)))
    pairs = zip(bounds, list(bounds)[1:], strict=False)
    pieces = [_piece(module, set(work[a:b]), state) for a, b in pairs]
    return pieces if _can_part(module, pieces) else []


def _is_work(node: fx.Node) -> bool:
    called = node.op in ("call_function", "call_method", "call_module")
    return called and not is_region(node)


def _cuts(work: Sequence[fx.Node]) -> list[int]:
    """Where blocks begin, and where the last ends: positions in `work`."""
    kinds = [_kind(node) for node in work]
    best, found = SAVED - 1, None
    for period in _periods(kinds):
        same = [a == b for a, b in zip(kinds, kinds[period:], strict=False)]
        first, last = _longest_run(same)
        length = last - first + period  # nodes of the run
        saved = length - period
        if saved >= period and saved > best:
            best, found = saved, (first, length, period)
    if found is None:
        return []
    first, length, period = found
    crossing = _crossing(work)
    begins = range(first, first + period)
    begin = min(begins, key=lambda at: (crossing[at + period], at))
    return list(range(begin, first + length + 1, period))


def _kind(node: fx.Node) -> int:
    """A number that is equal for operations of the same kind and sizes."""
    text = repr(fx.map_arg((node.args, node.kwargs), lambda read: None))
    value = of_node(node).get("val")
    size = tuple(value.shape) if isinstance(value, Tensor) else None
    return hash((node.op, str(node.target), text, size))


def _periods(kinds: Sequence[int]) -> list[int]:
    """The commonest distances between an operation and the next of its kind."""
    before: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for position, kind in enumerate(kinds):
        if kind in before:
            distances[position - before[kind]] += 1
        before[kind] = position
    return [distance for distance, _ in distances.most_common(PERIODS)]


def _longest_run(flags: Sequence[bool]) -> tuple[int, int]:
    """Begin and end of the longest run of True."""
    best, begin = (0, 0), 0
    for position, flag in enumerate((*flags, False)):
        if not flag:
            if position - begin > best[1] - best[0]:
                best = begin, position
            begin = position + 1
    return best


def _crossing(work: Sequence[fx.Node]) -> list[int]:
    """How many values are made before each position and read from it on."""
    position = {node: i for i, node in enumerate(work)}
    change = [0] * (len(work) + 2)
    for node, i in position.items():
        last = max((position.get(user, i) for user in node.users), default=i)
        change[i + 1] += 1
        change[last + 1] -= 1
    counts, count = [], 0
    for each in change:
        count += each
        counts.append(count)
    return counts


def _piece(module: fx.GraphModule, inside: set[fx.Node], state: int) -> Piece:
    arguments = module.graph.find_nodes(op="placeholder")
    number = {node: i for i, node in enumerate(arguments)}
    own_nodes = [node for node in module.graph.nodes if node in inside]
    read = dict.fromkeys(p for node in own_nodes for p in node.all_input_nodes)
    outer = [p for p in read if p not in inside and p.op != "get_attr"]
    weights = [p for p in outer if number.get(p, state) < state]
    inputs = (*weights, *(p for p in outer if number.get(p, state) >= state))
    outputs = tuple(n for n in own_nodes if any(u not in inside for u in n.users))
    graph = fx.Graph()
    regions = CopiedRegions(graph)
    new: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        new[node] = graph.placeholder(node.name)
        of_node(new[node])["val"] = of_node(node).get("val")
    for node in module.graph.nodes:
        regions.pass_by(node)
        if node not in inside:
            continue
        regions.enter()
        for each in node.all_input_nodes:
            if each.op == "get_attr" and each not in new:
                new[each] = graph.node_copy(each)
        new[node] = graph.node_copy(node, new.__getitem__)
        new[node].meta = dict(node.meta)
    regions.leave()
    graph.output(tuple(new[node] for node in outputs))
    old = {copy: node for node, copy in new.items()}
    sources = tuple(old.get(node) for node in graph.nodes)
    return Piece(lazy_module(module, graph), sources, inputs, len(weights), outputs)


def _can_part(module: fx.GraphModule, pieces: Sequence[Piece]) -> bool:
    """Whether pieces give what the whole does, to the bit.

    What goes from piece to piece must be contiguous tensors in memory of their own. A
    gradient that several pieces add to must come from one operation of each, or sums
    would be taken in another order; autocast casts a weight once for all that read it.
    """
    work = [node for node in module.graph.nodes if _is_work(node)]
    autocast = any(n.target is REGION_ENTERS[0] for n in module.graph.nodes)
    returned = list(result(module))
    if len({*returned}) < len(returned) or not {*returned} <= {*work}:
        return False
    for piece in pieces:
        values = [of_node(node).get("val") for node in (*piece.inputs, *piece.outputs)]
        crossing = [of_node(n).get("val") for n in piece.outputs if _crosses(n)]
        tensors = [value for value in values if isinstance(value, Tensor)]
        apart = len({storage(t) for t in tensors}) == len(tensors)
        if not piece.outputs or not apart:
            return False
        if not all(isinstance(v, Tensor) and v.is_contiguous() for v in crossing):
            return False
    readers: Counter[fx.Node] = Counter(n for piece in pieces for n in piece.inputs)
    for piece in pieces:
        for node in piece.inputs:
            shared = readers[node] > 1 and of_node(node)["val"].requires_grad
            if shared and (autocast or _uses(node, piece) > 1):
                return False
    return True


def _crosses(node: fx.Node) -> bool:
    return any(user.op != "output" for user in node.users)


def _uses(node: fx.Node, piece: Piece) -> int:
    """How often operations of a piece read a value."""
    argument = piece.module.graph.find_nodes(op="placeholder")[piece.inputs.index(node)]
    reads: list[fx.Node] = []
    for user in argument.users:
        fx.map_arg((user.args, user.kwargs), reads.append)
    return reads.count(argument)
