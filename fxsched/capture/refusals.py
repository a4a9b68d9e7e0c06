"""What Dynamo's graphs may hold that cannot be planned: said before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..ir.graphs import ancestors, name_of, named_arguments, tensors
from ..ir.user_line import user_line
from ..jobs.job import PlanError
from ..placement.declared import DECLARED, lacks_dims
from ..placement.own_backward import own_name
from ..placement.rule_table import rule_of
from .graph_breaks import why_of
from .vmaps import vmaps

# Nodes that open a transform of torch.func; what follows runs inside it.
TRANSFORMS = {
    "_grad_increment_nesting": "torch.func.grad, vjp, jacrev or hessian",
    "_vmap_increment_nesting": "torch.vmap",
    "_jvp_increment_nesting": "torch.func.jvp or jacfwd",
}

# Functions of functions, and what to write instead.
BRANCHES = {
    "cond": "torch.where(predicate, a, b)",
    "while_loop": "a loop of a fixed number of steps",
    "scan": "a Python loop",
    "associative_scan": "torch.cumsum and the like, or a Python loop",
}
SYMBOLS = (torch.SymInt, torch.SymBool, torch.SymFloat)
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def refuse_transforms(gm: fx.GraphModule) -> None:
    """Raises PlanError for transforms of torch.func, but for those that are opened.

    They turn on modes of the whole thread in one node and off in another (hooks for
    saved tensors among them): run or traced node by node, an error between leaves them
    on for all that runs later.
    """
    opened = {node for nodes in vmaps(gm.graph) for node in nodes}
    nodes = [node for node in gm.graph.nodes if node not in opened]
    for i, node in enumerate(nodes):
        name = name_of(node.target)
        if name in TRANSFORMS:
            where = next(filter(None, map(where_of, nodes[i:])), "")
            raise PlanError(
                f"the model uses {TRANSFORMS[name]}{where}, whose operations cannot "
                "be cut into jobs; write the computation with other torch operations, "
                "or move it out of the compiled model"
            )


def refuse_generators(gm: fx.GraphModule) -> None:
    """Raises PlanError for draws from a torch.Generator, which torch.export makes an
    input that operations do not take."""
    for node in gm.graph.nodes:
        if named_arguments(node).get("generator") is not None:
            raise PlanError(
                f"{name_of(node.target)} draws from a torch.Generator{where_of(node)}, "
                "which would give each microbatch other numbers than in eager PyTorch; "
                "leave out generator= (then torch.manual_seed sets the numbers), or "
                "draw outside of the model and pass the numbers as a tensor"
            )


def refusal(gm: fx.GraphModule) -> PlanError | None:
    """The error for what the graph holds and no plan can, with its line."""
    for node in gm.graph.nodes:
        name = name_of(node.target)
        if node.op == "get_attr" and isinstance(
            getattr(gm, str(node.target), None), FakeTensor
        ):
            return PlanError(
                "the model makes a tensor in a way that tracing doesn't see"
                f"{where_of(node)}; write it with other torch operations"
            )
        if isinstance(node.target, HigherOrderOperator) and name in BRANCHES:
            return PlanError(
                f"the model uses torch.{name}{where_of(node)}, whose operations cannot "
                f"be cut into jobs; write {BRANCHES[name]}"
            )
        if node.target in DECLARED and lacks_dims(node):
            return PlanError(
                f"placements({node.target}, forward=) has Shard(..) of more dimensions "
                f"than the tensors have{where_of(node)}; give dimensions that the "
                "tensors have"
            )
        if isinstance(node.target, HigherOrderOperator) and not (
            own_name(node) or rule_of(node.target)
        ):
            kernel = "triton" in name
            what = "a Triton kernel" if kernel else f"torch.ops.higher_order.{name}"
            return PlanError(
                f"the model calls {what}{where_of(node)}, and fxsched doesn't know how "
                "it treats the rows of a batch; make it an operator of torch.library "
                f"({'triton_op' if kernel else 'custom_op'}) and describe it with "
                "fxsched.placements, or write it with other torch operations"
            )
        named = named_arguments(node)
        if name in RECURRENT and _drops_between_layers(named):
            return PlanError(
                f"{name} has dropout between its layers{where_of(node)}, which PyTorch "
                "drops when it traces the backward; make each layer a module of "
                "its own, with nn.Dropout between them"
            )
        if named.get("sparse"):
            return PlanError(
                f"an embedding has sparse=True{where_of(node)}, and sparse gradients "
                "cannot be sent or added up; use sparse=False"
            )
        value = node.meta.get("example_value")
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            return PlanError(
                f"the model has a sparse tensor ({value.layout}){where_of(node)}, "
                "which cannot be sent or kept between F and B; make it dense"
            )
    return None


def _drops_between_layers(named: Mapping[str, Any]) -> bool:
    return bool(named["num_layers"] > 1 and named["dropout"] and named["train"])


def is_open(node: fx.Node) -> bool:
    """Whether a node's value has, or is, a size that its run finds."""
    value = node.meta.get("example_value")
    symbols = [value] if isinstance(value, SYMBOLS) else []
    return any(map(free_unbacked_symbols, [*symbols, *tensors(value)]))


def where_of(node: fx.Node) -> str:
    """Where the user's code made a node, as text to follow what it is."""
    line = user_line(node.meta.get("stack_trace"))
    return f" at\n  {line}\n " if line else ""


@contextmanager
def refused(node: fx.Node) -> Iterator[None]:
    """Errors of a node, as PlanErrors with its line."""
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{error}{where_of(node)}") from error
    except Exception as error:
        opened = [n for n in sorted(ancestors([node])) if is_open(n)]
        lines = [user_line(n.meta.get("stack_trace")) for n in (*opened[:1], node)]
        made = str(lines[0]) if lines[0] != lines[-1] else ""
        raise PlanError(
            f"the operation {name_of(node.target)} cannot be planned{where_of(node)} "
            f"({why_of(error, made)}); write it with other torch operations, "
            "or compute it outside the compiled model"
        ) from error
