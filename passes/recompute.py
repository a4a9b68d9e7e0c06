"""What B computes again of parts of the model, instead of keeping it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import fx

from ..ir.graphs import Role, module_prefixes, tensors
from ..ir.meta import note, of_node
from ..ir.request import Request
from ..ir.user_line import line_of
from ..jobs.job import PlanError


def mark_recomputed(gm: fx.GraphModule, request: Request) -> fx.GraphModule:
    """Nodes of modules that are to be computed again, as in torch.utils.checkpoint.

    before: h = linear(x, w); y = gelu(h)                 # of module blocks.0
    after:  the same, with meta["recompute"] = "blocks.0", for carry={"blocks.*":
            "recompute"}: F saves x alone, and B starts with h and y

    Each module is computed again by itself, but for what draws random numbers.
    Raises PlanError for names of no module, and for modules that write into buffers.
    """
    words = request.carry
    if not isinstance(words, tuple) or not request.training:
        return gm
    unknown = [name for name, _ in words]
    for node in gm.graph.nodes:
        if not node.op.startswith("call"):
            continue
        for name, word in words:
            region = next(
                (p for p in module_prefixes(node) if fnmatchcase(p, name)), None
            )
            if region is None:
                continue
            unknown = [each for each in unknown if each != name]
            of_node(node).pop("recompute", None)
            if word == "recompute":
                note(node, recompute=region)
        if "recompute" in of_node(node) and of_node(node).get("mutates"):
            raise PlanError(
                f"carry: {of_node(node)['module']} writes into a buffer"
                f"{line_of(node.meta.get('stack_trace'))}\n  B would write once more; "
                "leave the module out of carry="
            )
    if unknown:
        known = sorted(
            {
                p
                for n in gm.graph.nodes
                if "module" in n.meta
                for p in module_prefixes(n)
            }
        )
        near = difflib.get_close_matches(unknown[0], known, 3) or known[:3]
        raise PlanError(
            f"carry={{{unknown[0]!r}: ..}} names no module that the model calls; name "
            f"one, such as {', '.join(near)}"
        )
    return gm


def marked(node: fx.Node) -> object:
    """The region that a node is computed again with, if it is in one."""
    return of_node(node).get("recompute")


def again_text(nodes: Iterable[fx.Node]) -> str:
    """What is said of modules that B computes again."""
    regions = (marked(node) for node in nodes)
    names = ", ".join(dict.fromkeys(r for r in regions if isinstance(r, str)))
    return f"B computes again what F computes of {names}" if names else ""


class Regions:
    """What regions of nodes save, and what is kept of them if B computes them again.

    of: the region of a node, or None. rebuilt, seconds: bytes that F saves in a region,
    and of F. kept: bytes that regions read, by the first node of theirs that does.
    """

    def __init__(
        self, nodes: Iterable[fx.Node], of: Callable[[fx.Node], Any] = marked
    ) -> None:
        self.of = of
        self.rebuilt: dict[Any, float] = {}
        self.seconds: dict[Any, float] = {}
        self.kept: dict[fx.Node, float] = {}
        read: set[tuple[Any, fx.Node]] = set()
        for node in nodes:
            region = of(node)
            if region is None:
                continue
            work = of_node(node)["work"]
            self.rebuilt[region] = self.rebuilt.get(region, 0.0) + work.held
            self.seconds[region] = self.seconds.get(region, 0.0) + work.forward
            for other in node.all_input_nodes:
                known = other.op == "placeholder" or (region, other) in read
                if of(other) != region and not known:
                    read.add((region, other))
                    self.kept[node] = self.kept.get(node, 0.0) + value_bytes(other)

    def again(self, block: Sequence[fx.Node]) -> float:
        """Seconds in which B computes what F did."""
        inside = (node for node in block if self.of(node) is not None)
        return float(sum(of_node(node)["work"].forward for node in inside))

    def held(self, block: Sequence[fx.Node]) -> float:
        """Bytes between F and B."""
        own = (of_node(n)["work"].held for n in block if self.of(n) is None)
        return float(sum(own)) + sum(self.kept.get(node, 0.0) for node in block)

    def temporary(self, node: fx.Node) -> float:
        """Bytes that a node's B takes: the gradients that it reads and gives, and what
        its region computes again."""
        given = sum(_gradient(each) for each in node.all_input_nodes)
        rebuilt: float = self.rebuilt.get(self.of(node), 0.0)
        return _gradient(node) + given + rebuilt


def value_bytes(node: fx.Node) -> float:
    """Of what a node gives."""
    return float(sum(t.nbytes for t in tensors(of_node(node)["val"])))


def _gradient(node: fx.Node) -> float:
    """Bytes of the gradient of what a node gives, if it has one."""
    if of_node(node).get("role") in (Role.PARAMETER, Role.BUFFER):
        return 0.0
    values = tensors(of_node(node).get("val"))
    return float(sum(t.nbytes for t in values if t.requires_grad))
