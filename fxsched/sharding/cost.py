"""What cutting a region saves, and what its exchanges cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from ..costmodel.costs import rates_of, send_seconds
from ..ir.graphs import tensors
from .layouts import value_of
from .nodes import matrices
from .own_rows import is_sum
from .region import Region


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
