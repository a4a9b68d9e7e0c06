"""Runs a model's microbatch in one piece and in shards, on random numbers."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..ir.facts import facts
from ..ir.graphs import is_mutable, is_view, name_of, numbered_draws, tensors
from ..ir.parts import PartOf
from ..ir.regions import Regions
from ..ir.user_line import line_of
from ..jobs.job import PlanError
from .vocabulary_rules import lookup_of, loss_of

FLOPS = 5e9  # of a microbatch's F, up to which it is tried: a tenth of a second
NEAR = 1e-3  # of the largest number, that results may be apart; of 16 bits, NEAR_16
NEAR_16 = 5e-2
SAME = ("clone", "index", "gather", "getitem", "pad")  # beside views
COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")


def try_shards(
    whole: fx.GraphModule, sharded: fx.GraphModule, same: Mapping[fx.Node, fx.Node]
) -> bool:
    """Whether the shards were tried: both graphs give the same, for random weights and
    inputs. What is large, has stages of the whole batch, or doesn't take any numbers,
    isn't tried.

    same: nodes of the model, and those of the shards that give all of what they do.
    Raises PlanError if they don't: then a rule of this package is wrong.
    """
    nodes = whole.graph.nodes
    flops = sum(node.meta["work"].flops for node in nodes if "work" in node.meta)
    if flops > FLOPS or any(node.meta.get("joint") for node in nodes):
        return False
    values = _Inputs(whole, facts(sharded).parts)
    try:
        wanted = _run(whole, values, same.keys())
    except (IndexError, RuntimeError):
        return False
    found = _run(sharded, values, set(same.values()))
    ends = whole.graph.output_node(), sharded.graph.output_node()
    for a, b in [*same.items(), ends]:
        if not all(map(_near, tensors(wanted[a]), tensors(found[b]))):
            raise PlanError(
                f"the shards give another {a.name} than the model, by a rule of "
                "fxsched that doesn't hold for it (please report it); leave "
                "Schedule(shards=) out, or name other weights, backend(shards={..})"
                f"{line_of(a.meta.get('stack_trace'))}"
            )
    return True


class _Inputs:
    """Random inputs, by position, the same for both graphs: 0 and 1 where they are
    ints, but for indices, which are of all of a table."""

    def __init__(self, gm: fx.GraphModule, parts: Mapping[int, PartOf]) -> None:
        self.parts = parts
        self.generator = torch.Generator().manual_seed(0)
        placeholders = gm.graph.find_nodes(op="placeholder")
        ranges = _index_ranges(gm.graph)
        self.values: dict[int, Tensor] = {
            n.meta["index"]: self._random(n.meta["val"], ranges.get(n, 2))
            for n in placeholders
        }

    def of(self, node: fx.Node) -> Tensor:
        """What a placeholder gets."""
        index = node.meta["index"]
        if index in self.values:
            return self.values[index].clone()
        weight, (dim, outer, parts), number = self.parts[index]
        blocks = torch.unflatten(self.values[weight], dim, (outer, parts, -1))
        return blocks.select(dim + 1, number).flatten(dim, dim + 1).clone()

    def _random(self, fake: Tensor, size: int) -> Tensor:
        shape, generator = tuple(map(int, fake.shape)), self.generator
        if fake.is_floating_point() or fake.is_complex():
            kind = torch.complex64 if fake.is_complex() else torch.float32
            value = torch.randn(shape, generator=generator, dtype=kind) / 8
        elif size > 2:
            value = _spread_out(shape, size, generator)
        else:
            value = torch.randint(2, shape, generator=generator)
        return value.to(fake.device, fake.dtype)


def _index_ranges(graph: fx.Graph) -> dict[fx.Node, int]:
    """How many values the inputs may have that are nothing but indices: the number of
    rows of the smallest table that they are of; inputs of other ints aren't here."""
    inputs = graph.find_nodes(op="placeholder")
    ranges = {node: _range(node) for node in inputs}
    return {node: size for node, size in ranges.items() if size is not None}


def _range(node: fx.Node) -> int | None:
    fake = node.meta["val"]
    if fake.is_floating_point() or fake.dtype is torch.bool:
        return None
    sizes: list[int] = []
    seen, queue = {node}, [node]
    while queue:
        read = queue.pop()
        for user in read.users:
            size = _size(user, read)
            if size is not None:
                sizes.append(size)
            elif _keeps(user) and user.args[0] is read:
                queue += {user} - seen
                seen.add(user)
            elif name_of(user.target) not in COMPARED:
                return None
    return min(sizes, default=None)


def _keeps(user: fx.Node) -> bool:
    """Whether a node gives some of the numbers that it reads."""
    view = is_view(user.target) and not is_mutable(user.target)
    return view or name_of(user.target) in SAME


def _size(user: fx.Node, read: fx.Node) -> int | None:
    """The rows of a table that a node reads by an index; None if it doesn't."""
    lookup, loss = lookup_of(user), loss_of(user)
    if lookup is not None and lookup.indices is read:
        return int(lookup.weight.meta["val"].shape[0])
    if loss is not None and loss.labels is read:
        return int(loss.logits.meta["val"].shape[1])
    return None


def _spread_out(shape: Iterable[int], size: int, generator: torch.Generator) -> Tensor:
    """Numbers below `size` in random order, from all of its ranges."""
    count = torch.Size(shape).numel()
    numbers = torch.arange(count) * max(size // max(count, 1), 1) % size
    return numbers[torch.randperm(count, generator=generator)].reshape(tuple(shape))


def _run(
    gm: fx.GraphModule, inputs: _Inputs, wanted: Container[fx.Node]
) -> dict[fx.Node, Any]:
    """What some nodes of a graph give, and its outputs."""
    interpreter = fx.Interpreter(gm)
    values: dict[fx.Node, Any] = {}
    found: dict[fx.Node, Any] = {}
    draws = numbered_draws(gm.graph.nodes)
    with Regions() as regions, torch.random.fork_rng(), torch.no_grad():
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                values[node] = inputs.of(node)
                continue
            if regions.pass_by(node):
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "output":
                found[node] = args[0]
            else:
                if draws[node]:
                    torch.manual_seed(draws[node][0].number)
                run: Callable[..., Any] = getattr(interpreter, node.op)
                values[node] = run(node.target, args, kwargs)
                if node in wanted:
                    found[node] = pytree.tree_map_only(
                        Tensor, Tensor.clone, values[node]
                    )
    return found


def _near(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point() and not a.is_complex():
        return torch.equal(a, b)
    near = NEAR_16 if a.dtype in (torch.float16, torch.bfloat16) else NEAR
    most = float(a.abs().nan_to_num().max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=near, atol=near * most, equal_nan=True)
