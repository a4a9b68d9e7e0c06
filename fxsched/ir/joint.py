"""How values go in and out of global-batch stages, which run once on the rows of all
microbatches.

In a traced graph a joint node reads what microbatches make through `join`, and nodes of
microbatches what global-batch ones make through `part`. In a graph of stages, which
stands for any microbatch, `of` is a value of one of them, and `each` the one for its
own, which may be the same for all; `total` is the sum over them.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import fx


def join(value: Any, how: str, dim: int, microbatches: int) -> NoReturn:
    """What a value of microbatches is for the whole batch: their rows along `dim`
    ("rows"), or their "sum" or "mean"."""
    raise AssertionError("stages have their own operations for it")


def part(value: Any, dim: int, microbatches: int) -> NoReturn:
    """A microbatch's rows, along `dim`, of a value of the whole batch."""
    raise AssertionError("stages have their own operations for it")


def of(value: Any, microbatch: int) -> NoReturn:
    """What a value is in one microbatch."""
    raise AssertionError("programs name the value itself")


def each(*values: Any) -> NoReturn:
    """In each microbatch, the value at its place."""
    raise AssertionError("programs name the value itself")


def total(value: Any) -> NoReturn:
    """The sum of a value over all microbatches."""
    raise AssertionError("programs have the sum itself")


def is_pointer(node: fx.Node) -> bool:
    """Whether a node of a graph of stages only points to values of others."""
    return node.target in (of, each, total)


def is_whole(node: fx.Node) -> bool:
    """Whether a value is one that all microbatches read as it is."""
    return node.target is each and len(set(node.args)) == 1


def resolve(node: fx.Node, microbatch: int) -> tuple[fx.Node, int]:
    """The value that a node of a graph of stages is in a microbatch, and of which."""
    args: Any = node.args
    if node.target is of:
        return resolve(args[0], args[1])
    if node.target is each:
        return resolve(args[microbatch], 0)
    return node, microbatch


def ends(node: fx.Node) -> list[fx.Node]:
    """The values that a node points to, in all microbatches; itself if it is none."""
    return [each for each in pointed(node) if not is_pointer(each)]


def pointed(node: fx.Node) -> list[fx.Node]:
    """A node, and all that it points to."""
    if not is_pointer(node):
        return [node]
    return [node, *(n for value in node.all_input_nodes for n in pointed(value))]
