"""What cutting a region saves, and whether it is right: a microbatch runs in one piece
and in shards, on random numbers."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..costmodel.costs import rates_of, send_seconds
from ..ir.facts import facts
from ..ir.graphs import is_view, name_of, numbered_draws, tensors
from ..ir.parts import PartOf
from ..ir.regions import Regions
from ..ir.user_line import line_of
from ..jobs.job import PlanError
from .layouts import matrices, value_of
from .own_rows import is_sum
from .region import Region
from .vocabulary_rules import lookup_of, loss_of

FLOPS = 5e9  # of a microbatch's F, up to which it is tried: a tenth of a second
NEAR = 1e-3  # of the largest number, that results may be apart; of 16 bits, NEAR_16
NEAR_16 = 5e-2
SAME = ("clone", "index", "gather", "getitem", "pad")  # beside views
COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")


def gain(region: Region, chosen: Region, shards: int) -> float:
    """Seconds that a microbatch's F and B get shorter by, if a region runs in parts and
    not on one shard; below 0 if they get longer.

    chosen: what runs in parts besides. A value that all shards are sent for it anyway
    costs a latency and no bytes more.
    """
    work = [node.meta["work"] for node in region.layouts]
    saved: float = sum(w.forward + w.backward for w in work) * (1 - 1 / shards)
    return saved - sum(
        _seconds(node, share * (shards - 1)) for node, share in _sent(region, chosen)
    )


def _sent(region: Region, chosen: Region) -> Iterator[tuple[fx.Node, float]]:
    """Values that go from shard to shard, and how much of each a shard sends to each
    other one."""
    entering = dict.fromkeys(
        read
        for node in region.layouts
        for read in node.all_input_nodes
        if "stage" in read.meta and read not in region.layouts
    )
    for node in entering:
        yield node, 1.0 - _is_sent(node, region, chosen)
    for node in region.gathered:
        if is_sum(region.layouts[node]) and region.calls[node].join is None:
            yield node, 1.0 - _is_sent(node, region, chosen)
        else:
            yield node, _bytes(region.calls[node].value) / _bytes(value_of(node))


def _is_sent(value: fx.Node, region: Region, chosen: Region) -> bool:
    """Whether all shards are sent a value, or what is made of it, for other regions."""
    seen, queue = set[fx.Node](), [value]
    while queue:
        for user in queue.pop().users:
            if user in chosen.layouts:
                return True
            if not (user in seen or user in region.layouts or matrices(user)):
                seen.add(user)
                queue.append(user)
    return False


def _seconds(node: fx.Node, share: float) -> float:
    """Seconds to send a share of a value forward and, if it has one, of its gradient
    back, and to add up what comes."""
    found = list(tensors(value_of(node)))
    device = found[0].device
    ways = 1 + any(t.requires_grad for t in found)
    size = int(share * _bytes(value_of(node)))
    added = size * 3 / rates_of(device).memory
    return ways * (send_seconds(size, device) + added)


def _bytes(value: Any) -> int:
    return max(sum(t.nbytes for t in tensors(value)), 1)


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
    return is_view(user.target) or name_of(user.target) in SAME


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
