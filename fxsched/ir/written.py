"""The operation that stands for a write: it gives what memory is after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

# From a tensor to its view: names of operations with their other arguments, as graphs
# are printed; or an item's number.
Path = Sequence[tuple[str, Sequence[Any], Mapping[str, Any]] | int]


def written(
    op: Any, call: Mapping[str, Any], paths: Mapping[str, Any], before: Sequence[Any]
) -> Any:
    """What tensors are after an operation wrote into views of them.

    call: its arguments by name, with the tensors in the place of the views.
    paths: from each of these to its view, by name; a list of them for a list.
    before: the views as they were, for what is known of them.

    Gives the tensor; or the operation's result and the tensors, where these are
    several, or the result is more than what was written into. Gradients are those of
    the write: none of what is written without gradients.
    """
    versions: list[Tensor] = []
    known: dict[int, Tensor] = {}

    def view(value: Tensor, path: Path) -> Any:
        if id(value) not in known:
            with torch.enable_grad():
                known[id(value)] = value.clone()
        versions.append(known[id(value)])
        return _along(versions[-1], path)

    views = {
        name: list(map(view, call[name], path))
        if isinstance(call[name], (list, tuple))
        else view(call[name], path)
        for name, path in paths.items()
    }
    result = op(**{**call, **views})
    return versions[0] if gives_one(op, paths) else (result, *versions)


def gives_one(op: Any, paths: Mapping[str, Any]) -> bool:
    """Whether `written` gives a tensor, and no tuple."""
    more = any(each.alias_info is None for each in op._schema.returns)
    kinds = {each.name: str(each.type) for each in op._schema.arguments}
    return len(paths) == 1 and not more and "List" not in kinds[next(iter(paths))]


def _along(value: Any, path: Path) -> Any:
    for step in path:
        if isinstance(step, int):
            value = value[step]
        else:
            name, args, kwargs = step
            target = attrgetter(name)(torch.ops)
            value = target(value, *args, **kwargs)
    return value
