"""Helpers for passes of the user, and the function that runs these passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..ir import ops
from ..ir.graphs import Spec, tensors
from ..ir.lazy import lazy_module
from ..ir.meta import note_call, of_call
from ..ir.request import Request
from ..jobs.job import PlanError

Pass = Callable[[fx.GraphModule, Request], fx.GraphModule]
PLACE = ("worker", "task", "n")


def replaces(new: fx.Node, old: fx.Node | None = None) -> None:
    """Declares that a node of your pass replaces the value of another node.

    Declare this if the new node computes something else than the old one, for example a
    rounded value. Without `old`, replaces declares that the job call `new` runs another
    module than the planned stage.

    Without this declaration, the checks refuse programs that read the new node. With
    it, they treat the new node as the value of `old`, and the plan lists the
    replacement.
    """
    of_call(new)["replaces"] = new.name if old is None else old.name


def stage_graphs(program: fx.GraphModule) -> Iterator[tuple[str, fx.GraphModule]]:
    """The ATen graphs of a program's stages, by name ("forward_0.flat_forward").

    Stages that compute the same share one graph, which is yielded once. Changes to a
    graph affect this program only.
    """
    copies: dict[fx.GraphModule, fx.GraphModule] = {}
    for name, stage in list(_called(program)):
        stage_copy = _copy(stage)
        setattr(program, name, stage_copy)
        for inner, flat in list(_called(stage)):
            known = flat in copies
            copies[flat] = copies[flat] if known else _copy(flat)
            setattr(stage_copy, inner, copies[flat])
            if not known:
                yield f"{name}.{inner}", copies[flat]


def _called(module: fx.GraphModule) -> Iterator[tuple[str, fx.GraphModule]]:
    """The graphs that a graph calls, by their names in it."""
    calls = module.graph.find_nodes(op="call_module")
    for name in dict.fromkeys(str(node.target) for node in calls):
        inner = module.get_submodule(name)
        if isinstance(inner, fx.GraphModule):
            yield name, inner


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    """A module with a graph of its own and the same constants."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copied = lazy_module(module, graph, type(module).__name__)
    copied.meta.update(module.meta, replaced=True)
    return copied


def pass_name(each: Pass) -> str:
    """A pass as errors name it."""
    return str(getattr(each, "__qualname__", repr(each)))


def run_passes(
    program: fx.GraphModule, request: Request, worker: int, passes: Sequence[Pass]
) -> fx.GraphModule:
    """What the user's passes make of a program, with all facts on its nodes.

    Raises PlanError for a pass that breaks it; what it raises itself goes through.
    """
    for each in passes:
        name = pass_name(each)
        try:
            program = each(program, request)
        except Exception as error:
            where = f"in passes={name}, on the program of worker {worker}"
            error.add_note(f"fxsched: {where}")
            raise
        if not isinstance(program, fx.GraphModule):
            raise PlanError(
                f"the pass {name} returned {program!r} for worker {worker}; it must "
                "return each program that it is given, changed or not"
            )
        try:
            program.graph.lint()
        except RuntimeError as error:
            raise PlanError(
                f"the pass {name} breaks the program of worker {worker}: {error}"
            ) from error
    complete_nodes(program, worker)
    return program


def complete_nodes(program: fx.GraphModule, worker: int) -> None:
    """Nodes of the user's get their places, and shapes where those are needed.

    before: narrow = narrow(a_0)
            send_3 = send(narrow, to=1, tag=3)  # worker 0, task 0F0, n 0
    after:  narrow = narrow(a_0)  # worker 0, task 0F0, n 0
            send_3 = send(narrow, to=1, tag=3)  # worker 0, task 0F0, n 0

    A node belongs to the first task that reads it, else to the one that made what it
    reads; else, if it reads what another worker sent, it is a task of its own; else it
    belongs to the task of the next node.
    """
    nodes = list(program.graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    inside = [node for node in nodes if node.op not in ("placeholder", "output")]
    inserted = [node for node in inside if "task" not in of_call(node)]
    for node in inserted:
        of_call(node)["own"] = True
    for node in reversed(inserted):
        readers = sorted(filter(_has_task, node.users), key=position.__getitem__)
        if readers:
            _place(node, readers[0])
    for node in inserted:
        if not _has_task(node):
            makers = [each for each in node.all_input_nodes if "task" in of_call(each)]
            after = filter(_has_task, nodes[position[node] :])
            if makers and not _has_task(makers[-1]):
                task, n = node.name, of_call(makers[-1])["n"]
                note_call(node, worker=worker, task=task, n=n)
            else:
                _place(node, makers[-1] if makers else next(after))
    for node in nodes:
        if node.target in (ops.send, ops.update) or node.op == "output":
            for value in node.all_input_nodes:
                _complete_specs(program, value)


def _has_task(node: fx.Node) -> bool:
    """Whether a node is part of a task of its worker, as a recv is not."""
    return "task" in of_call(node) and node.target not in (ops.recv, ops.fetch)


def _place(node: fx.Node, near: fx.Node) -> None:
    node.meta.update({key: near.meta[key] for key in PLACE})


def _complete_specs(program: fx.GraphModule, node: fx.Node) -> None:
    """The shapes of what a node of the user's gives, from a run on the meta device."""
    if "specs" in of_call(node):
        return
    for value in node.all_input_nodes:
        _complete_specs(program, value)
    try:
        args, kwargs = fx.map_arg((node.args, node.kwargs), _value)
        with torch.no_grad():
            result = getattr(fx.Interpreter(program), node.op)(
                node.target, args, kwargs
            )
        inputs = [s for v in node.all_input_nodes for s in of_call(v)["specs"]]
        device = inputs[0].device
        found = (Spec.of(each)._replace(device=device) for each in tensors(result))
        of_call(node)["specs"] = tuple(found)
    except Exception as error:
        raise PlanError(
            f"worker {of_call(node)['worker']}: {node} of {of_call(node)['task']}, "
            f"made by a pass and sent or returned, has no known shape: {error}; say it "
            "with node.meta['specs'], a fxsched.ir.graphs.Spec for each tensor"
        ) from error
    of_call(node)["bundle"] = not isinstance(result, Tensor)


def _value(node: fx.Node) -> Any:
    """A value like a node's, on the meta device."""
    tensors = tuple(spec.empty("meta") for spec in of_call(node)["specs"])
    bundle = of_call(node).get("bundle") or (
        node.op == "placeholder" and "group" in of_call(node)
    )
    return tensors if bundle else tensors[0]
