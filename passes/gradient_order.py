"""Keeps the order in which autograd adds up gradients of what several stages read."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from torch import Tensor, fx

from ..autodiff.gradient_strides import has_way_back
from ..ir.graphs import storage, tensors
from ..ir.meta import of_node
from ..ir.request import Request
from ..ir.user_line import line_of
from ..jobs.job import PlanError


def keep_gradient_order(gm: fx.GraphModule, request: Request) -> fx.GraphModule:
    """Lets a value that several stages read go from each to the next, if
    deterministic=True asks for it: then B of each adds to the gradient of those after.

    before: a = first(x)                                             # stage 0
            b = second(a)                                            # stage 1
            c = third(a, b)                                          # stage 2
    after:  the same; a.meta["passed"] = (1,): stage 1 gives a to stage 2

    Autograd runs nodes from the last to the first, and adds each gradient to those
    before it: (3 + 2) + 1. Stages that each add up their own and meet at the maker
    would have 3 + (2 + 1), in other bits for every way to cut the model. PlanError for
    what can't be so: weights and inputs, and stages that read a value by turns.
    """
    if request.deterministic and request.training:
        _move_views(gm.graph)
        place = {node: i for i, node in enumerate(gm.graph.nodes)}
        for node in filter(_takes_gradient, place):
            users = sorted(filter(_takes_gradient, node.users), key=place.__getitem__)
            _keep_order(node, [user for user in users if user.op != "output"])
    return gm


def _keep_order(node: fx.Node, users: list[fx.Node]) -> None:
    """Marks a value that is to go from stage to stage; users: in the model's order."""
    reads = [
        of_node(user).get("stage", -1) for user in users for _ in _reads(user, node)
    ]
    maker = of_node(node).get("stage", -1)
    stages = sorted({maker, *reads} - {-1})
    in_order = all(early <= late for early, late in pairwise([maker, *reads]))
    if len(stages) < 2:
        return
    if any(of_node(each).get("joint") for each in (node, *users)):
        fixed = (
            len(stages) == 2
        )  # however the model is cut, global-batch ones are apart
    elif maker >= 0:
        fixed = in_order or len(reads) <= 2
        passed = tuple(stage for stage in stages[:-1] if stage != maker)
        if in_order and passed:
            of_node(node)["passed"] = passed
    else:
        once = all(reads.count(stage) == 1 for stage in stages[:-1])
        fixed = len(reads) <= 2 or (in_order and once)
        fixed = fixed and node.op == "placeholder"  # else each stage computes it
    if not fixed:
        raise _unordered(node, users, stages)


def _move_views(graph: fx.Graph) -> None:
    """Cuts before views, where what crosses the cut would have gaps in its memory.

    before: k = key(x); t = k[:, 1:]  # stage 0
            w = q @ t  # stage 1
    after:  k = key(x)  # stage 0
            t = k[:, 1:]; w = q @ t  # stage 1
    """
    for node in reversed(graph.nodes):
        here = of_node(node).get("stage")
        users = [u for u in node.users if of_node(u).get("stage", here) != here]
        if here is None or not users or not has_gaps(node):
            continue
        readers = {
            of_node(user).get("stage") for user in node.users if user.op != "output"
        }
        if not _is_view(node) or len(readers) > 1:
            raise other_layout(f"stage {here} gives {node.name}", node, users)
        of_node(node)["stage"] = readers.pop()


def has_gaps(node: fx.Node) -> bool:
    """Whether memory has other values between those of a node, as in a part of a
    tensor: a message can't keep this layout."""
    values = tensors(of_node(node).get("val"))
    return not all(
        t.is_contiguous() or has_way_back(t.shape, t.stride()) for t in values
    )


def _is_view(node: fx.Node) -> bool:
    """Whether a node is another view of the one tensor that it reads."""
    values = [of_node(each).get("val") for each in (node, *node.all_input_nodes)]
    places = {storage(each) if isinstance(each, Tensor) else -1 for each in values}
    return len(values) == 2 and len(places) == 1 and -1 not in places


def other_layout(what: str, node: fx.Node, users: Iterable[fx.Node]) -> PlanError:
    """The error for what is sent in another layout than it is made in; users: what
    reads the value on the other side of the cut."""
    remedy = f"cut the model elsewhere, with stages={_together([node, *users])}"
    where = line_of(node.meta.get("stack_trace"))
    return PlanError(
        f"backend(deterministic=True): {what}{_of_module(node)} in a memory "
        "layout that a message would change, so that gradients would have other bits "
        f"under another cut of the model; {remedy}{where}"
    )


def _of_module(node: fx.Node) -> str:
    module = of_node(node).get("module")
    return f" of {module}" if module else ""


def _takes_gradient(node: fx.Node) -> bool:
    return any(value.requires_grad for value in tensors(of_node(node).get("val")))


def _reads(user: fx.Node, node: fx.Node) -> list[fx.Node]:
    """A node, as often as another adds to its gradient: F.normalize(x) reads x once,
    and its B adds twice."""
    read: list[fx.Node] = []
    fx.map_arg((user.args, user.kwargs), read.append)
    return [node] * max(read.count(node), _edges(user, node))


def _edges(user: fx.Node, node: fx.Node) -> int:
    """How many edges of autograd's records lead from one value to another that it is
    computed of."""
    inputs = [t for n in user.all_input_nodes for t in tensors(of_node(n).get("val"))]
    ends = {t.grad_fn for t in inputs}
    values = {id(t) for t in tensors(of_node(node).get("val"))}
    wanted = {t.grad_fn for t in tensors(of_node(node).get("val"))} - {None}
    queue: list[Any] = [t.grad_fn for t in tensors(of_node(user).get("val"))]
    seen, edges = set(queue), 0
    while queue:
        function = queue.pop()
        if function is None or function in ends:
            continue
        for read, _ in function.next_functions:
            edges += read in wanted or id(getattr(read, "variable", None)) in values
            if read not in seen:
                seen.add(read)
                queue.append(read)
    return edges


def _unordered(node: fx.Node, users: list[fx.Node], stages: list[int]) -> PlanError:
    name = of_node(node).get("name", node.name)
    nodes = users if node.op == "placeholder" else [node, *users]
    return PlanError(
        f"backend(deterministic=True): stages {', '.join(map(str, stages))} make or "
        f"read {name}{_of_module(node)}, and the sum of its gradients would have "
        "other bits under another cut of the model; cut the model elsewhere, with "
        f"stages={_together(nodes)}{line_of(node.meta.get('stack_trace'))}"
    )


def _together(nodes: Iterable[fx.Node]) -> str:
    """What keeps these in one stage, with what is between them."""
    names = dict.fromkeys(of_node(each).get("module", "") for each in nodes)
    known = [*filter(None, names)]
    said = f", or keep what makes and reads it together: same_stage={[known]}"
    return said if all(names) or len(known) > 1 else ""
