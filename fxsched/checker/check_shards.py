"""Holds a microbatch in shards against the same in one piece, on random numbers."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..ir.facts import facts
from ..ir.graphs import named_arguments, numbered_draws, tensors
from ..ir.meta import of_call, of_node
from ..ir.ops import seeded
from ..ir.parts import PartOf
from ..ir.regions import Regions
from ..ir.user_line import line_of
from ..jobs.job import PlanError

aten = torch.ops.aten
FLOPS = 5e9  # of a microbatch's F, up to which it is tried: a tenth of a second
NEAR = 1e-3  # of the largest number, that results may be apart; of 16 bits, NEAR_16
NEAR_16 = 5e-2


def try_shards(
    whole: fx.GraphModule, sharded: fx.GraphModule, same: Mapping[fx.Node, fx.Node]
) -> bool:
    """Whether the shards were tried: both graphs give the same, for random weights and
    inputs. What is large, has stages of the whole batch, or doesn't take any numbers,
    isn't tried.

    same: nodes of the model, and those of the shards that give all of what they do.
    Raises PlanError if they don't: then a rule of fxsched is wrong.
    """
    nodes = whole.graph.nodes
    flops = sum(
        of_node(node)["work"].flops for node in nodes if "work" in of_node(node)
    )
    if flops > FLOPS or any(of_call(node).get("joint") for node in nodes):
        return False
    for ints in (_classes(whole.graph), 2):
        inputs = _inputs(whole, ints)
        try:
            wanted = _run(whole, inputs, {}, same.keys())
            break
        except (IndexError, RuntimeError):  # ints that are no indices
            continue
    else:
        return False
    found = _run(sharded, inputs, facts(sharded).parts, set(same.values()))
    ends = whole.graph.output_node(), sharded.graph.output_node()
    for a, b in [*same.items(), ends]:
        if not all(map(_near, tensors(wanted[a]), tensors(found[b]))):
            raise PlanError(
                f"the shards compute another value of {a.name} than the model does: a "
                "rule of fxsched is wrong for it; please report this, and leave "
                "Schedule(shards=) out, or name other weights in "
                f"backend(shards={{..}}){line_of(a.meta.get('stack_trace'))}"
            )
    return True


def _classes(graph: fx.Graph) -> int:
    """The rows of the smallest table that is read by index, or classes of a loss; 2 if
    there is none."""
    tables = [("weight", 0, n) for n in _calls(graph, aten.embedding.default)]
    tables += [("self", 1, n) for n in _calls(graph, aten.cross_entropy_loss.default)]
    reads = ((named_arguments(node)[name], dim) for name, dim, node in tables)
    sizes = [int(of_call(each)["val"].shape[dim]) for each, dim in reads]
    return min(sizes, default=2)


def _calls(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=target))


def _inputs(gm: fx.GraphModule, ints: int) -> dict[int, Tensor]:
    """Random inputs, by position; those that are ints are below a number."""
    generator, inputs = torch.Generator().manual_seed(0), dict[int, Tensor]()
    for node in gm.graph.find_nodes(op="placeholder"):
        fake = of_call(node)["val"]
        shape = tuple(map(int, fake.shape))
        if fake.is_floating_point() or fake.is_complex():
            kind = torch.complex64 if fake.is_complex() else torch.float32
            value = torch.randn(shape, generator=generator, dtype=kind) / 8
        else:
            most = 2 if fake.dtype is torch.bool else ints
            value = torch.randint(most, shape, generator=generator)
        inputs[of_call(node)["index"]] = value.to(fake.device, fake.dtype)
    return inputs


def _input(
    index: int, inputs: Mapping[int, Tensor], parts: Mapping[int, PartOf]
) -> Tensor:
    """What a graph's input gets: a part, of what is in parts."""
    if index in inputs:
        return inputs[index].clone()
    weight, (dim, outer, count), number = parts[index]
    blocks = torch.unflatten(inputs[weight], dim, (outer, count, -1))
    return blocks.select(dim + 1, number).flatten(dim, dim + 1).clone()


def _run(
    gm: fx.GraphModule,
    inputs: Mapping[int, Tensor],
    parts: Mapping[int, PartOf],
    wanted: Container[fx.Node],
) -> dict[fx.Node, Any]:
    """What some nodes of a graph give, and its outputs."""
    interpreter = fx.Interpreter(gm)
    values: dict[fx.Node, Any] = {}
    found: dict[fx.Node, Any] = {}
    draws = numbered_draws(gm.graph.nodes)
    with Regions() as regions, torch.no_grad():
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                values[node] = _input(of_call(node)["index"], inputs, parts)
                continue
            if regions.pass_by(node):
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "output":
                found[node] = args[0]
                continue
            run: Callable[..., Any] = getattr(interpreter, node.op)
            if draws[node]:
                run = partial(seeded, run, draws[node][0].number)
            values[node] = run(node.target, args, kwargs)
            if node in wanted:
                found[node] = pytree.tree_map_only(Tensor, Tensor.clone, values[node])
    return found


def _near(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point() and not a.is_complex():
        return torch.equal(a, b)
    near = NEAR_16 if a.dtype in (torch.float16, torch.bfloat16) else NEAR
    most = float(a.abs().nan_to_num().max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=near, atol=near * most, equal_nan=True)
