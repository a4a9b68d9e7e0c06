"""Passes of the user's over the model's graph of one microbatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from ..ir.facts import facts
from ..ir.graphs import tensors
from ..ir.meta import of_node
from ..ir.regions import Regions
from ..ir.request import Request
from ..jobs.job import PlanError
from ..partition.costs import Meter, Work
from .users import pass_name

ModelPass = Callable[[fx.GraphModule, Request], fx.GraphModule]
Called = tuple[Any, Any, Any]


def run_model_passes(
    gm: fx.GraphModule, request: Request, passes: Sequence[ModelPass]
) -> fx.GraphModule:
    """What the user's passes make of a microbatch's graph, with all facts on its nodes.

    before: y = gelu(x)                      # of the model
    after:  y = gelu(x, approximate="tanh")  # of the user's pass

    Nodes call torch's functions, as Dynamo writes them. Raises PlanError for a pass
    that breaks the graph; what it raises itself goes through.
    """
    for each in passes:
        name, inputs, known = pass_name(each), _inputs(gm), gm.meta
        before = {node: _called(node) for node in gm.graph.nodes}
        try:
            gm = each(gm, request)
        except Exception as error:
            error.add_note(f"fxsched: in model_passes={name}")
            raise
        if not isinstance(gm, fx.GraphModule):
            raise PlanError(
                f"the pass {name} returned {gm!r}; it must return the model's graph, "
                "changed or not"
            )
        try:
            gm.graph.lint()
        except RuntimeError as error:
            raise PlanError(
                f"the pass {name} breaks the model's graph: {error}"
            ) from error
        if _inputs(gm) != inputs:
            raise PlanError(
                f"the pass {name} changed the inputs of the model's graph; leave its "
                "placeholders as they are"
            )
        gm.meta = {**known, **gm.meta}
        _complete(gm, name, before, request)
    return gm


def _inputs(gm: fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.find_nodes(op="placeholder")]


def _called(node: fx.Node) -> Called:
    return node.target, node.args, node.kwargs


def _complete(
    gm: fx.GraphModule, name: str, before: Mapping[fx.Node, Called], request: Request
) -> None:
    """Runs what a pass changed, and what reads that, on fake tensors, for what other
    passes want to know of a node."""
    interpreter = fx.Interpreter(gm)
    fresh: set[fx.Node] = set()
    place = ""
    with facts(gm).fake_mode, Regions() as regions:
        for node in gm.graph.nodes:
            changed = before.get(node) != _called(node)
            if not node.op.startswith("call") or regions.pass_by(node):
                continue
            if changed or not fresh.isdisjoint(node.all_input_nodes):
                fresh.add(node)
                of_node(node).setdefault("module", place)
                _run(interpreter, node, name, request)
            place = of_node(node)["module"]


def _run(
    interpreter: fx.Interpreter, node: fx.Node, name: str, request: Request
) -> None:
    """Gives a node its value, and what it costs."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: of_node(n).get("val"))
    read = list(tensors([*args, *kwargs.values()]))
    versions = [tensor._version for tensor in read]
    with Meter(request.device) as meter:
        try:
            value = getattr(interpreter, node.op)(node.target, args, kwargs)
        except Exception as error:
            why = str(error).split("\n")[0]
            raise PlanError(
                f"the pass {name} makes a node that can't run: {node.format_node()} "
                f"({type(error).__name__}: {why})"
            ) from error
    made = list(tensors(value))
    trained = any(tensor.requires_grad for tensor in made)
    forward = meter.total.seconds
    held = sum(tensor.nbytes for tensor in made) * trained
    pairs = zip(read, versions, strict=True)
    meta = {
        "work": Work(meter.total.flops, forward, 2 * forward * trained, held),
        "mutates": tuple(t for t, version in pairs if t._version != version),
        "learns": (),
        "random": meter.random,
        "stack_trace": "",
        "key": f"{of_node(node)['module']}:{node.name}",
        "rows": None,
    }
    node.meta.update({k: v for k, v in meta.items() if k not in node.meta}, val=value)
