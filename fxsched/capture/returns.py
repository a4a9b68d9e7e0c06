"""Where each output of Dynamo's graph goes: to the user, or into the model.

A model that gives an attribute a new tensor (`self.n = self.n + 1`) makes Dynamo return
that tensor from its graph and store it after the call. This file reads Dynamo's records
of what the function returns and stores; dynamo.py hands them in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx

from .caller import DEPTH
from .graph_inputs import evaluated

Path = tuple[int | str, ...]


class Returned(NamedTuple):
    """Where one output of the graph goes.

    label: where it is in what the user gets: an index or a key; several joined by dots;
        None, if it isn't there or nobody knows.
    stored: what it is assigned to, as Dynamo's sources.
    replaces: inputs of the graph that had these places before.
    version: the input that it is after the call, as the model writes into it.
    kept: whether it goes there alone, and is no output of Dynamo's.
    """

    label: int | str | None = None
    stored: tuple[str, ...] = ()
    replaces: tuple[int, ...] = ()
    version: int | None = None
    kept: bool = False


def read_returns(
    translator: Any,
    gm: fx.GraphModule,
    sources: Sequence[str],
    inputs: Sequence[Any],
    scope: dict[str, Any],
) -> tuple[Returned, ...]:
    """For each output of the graph, where it goes.

    translator: Dynamo's, while it compiles the graph.
    sources: Dynamo's expressions for the graph's inputs, which `scope` evaluates.
    """
    effects = translator.output.side_effects
    labels: dict[str, int | str] = {}
    for value in translator.stack[-1:]:
        for found in _tensors(value, effects):
            labels.setdefault(found.name, label_of(found.path))
    stored: dict[str, list[str]] = {}
    for found in _stores(effects):
        stored.setdefault(found.name, []).append(found.text)
    outputs: Any = gm.graph.output_node().args[0]
    returns = []
    for node in outputs:
        name = node.name if isinstance(node, fx.Node) else ""
        places = tuple(stored.get(name, ()))
        old = (_before(place, sources, inputs, scope) for place in places)
        replaced = tuple(dict.fromkeys(i for i in old if i is not None))
        returns.append(Returned(labels.get(name), places, replaced))
    return tuple(returns)


def label_of(path: Sequence[int | str]) -> int | str:
    """How backend(outputs=) names what is there in what a model returns."""
    if len(path) > 1:
        return ".".join(map(str, path))
    return path[0] if path else 0


def _before(
    source: str, sources: Sequence[str], inputs: Sequence[Any], scope: dict[str, Any]
) -> int | None:
    """The input of the graph that a place held before the call."""
    if source in sources:
        return sources.index(source)
    old = evaluated(source, scope)
    same = (i for i, value in enumerate(inputs) if value is old)
    return next(same, None) if isinstance(old, Tensor) else None


class _Found(NamedTuple):
    """One of the graph's values in a value of Dynamo's: its name, its path there, and
    how Python writes it."""

    name: str
    path: tuple[int | str, ...] = ()
    text: str = ""


def _tensors(
    value: Any, effects: Any, path: Path = (), text: str = ""
) -> Iterator[_Found]:
    value = value.unwrap() if hasattr(value, "unwrap") else value
    node = getattr(vars(value).get("proxy"), "node", None)
    if isinstance(node, fx.Node):
        yield _Found(node.name, path, text)
    elif len(path) < DEPTH:  # a list may hold itself
        for key, end, child in _children(value, effects):
            yield from _tensors(child, effects, (*path, key), text + end)


def _children(value: Any, effects: Any) -> Iterator[tuple[int | str, str, Any]]:
    """Items and attributes of a value of Dynamo's: the key, how to write it, and it."""
    members = vars(value)
    items = members.get("items")
    if isinstance(items, (list, tuple)):
        items = dict(enumerate(items))
    for key, child in items.items() if isinstance(items, dict) else ():
        label = _constant(key)
        yield label, f"[{label!r}]", child
    fields: tuple[str, ...] = getattr(members.get("value"), "_fields", ())
    for name, inner in members.items():
        # what a user's class has of list, tuple or dict
        if name.endswith("_vt") and hasattr(inner, "__dict__"):
            for key, end, child in _children(inner, effects):
                field = fields[key : key + 1] if isinstance(key, int) else ()
                yield (field[0], f".{field[0]}", child) if field else (key, end, child)
    for name, child in (effects.store_attr_mutations.get(value) or {}).items():
        yield name, f".{name}", child


def _constant(key: Any) -> int | str:
    constant = getattr(key, "vt", key)
    try:
        label = constant if isinstance(key, int) else constant.as_python_constant()
    except NotImplementedError:
        return str(key)
    return label if isinstance(label, (int, str)) else str(label)


def _stores(effects: Any) -> Iterator[_Found]:
    """What the function stores outside of itself."""
    for owner in list(effects.id_to_variable.values()):
        base = _place(getattr(owner, "source", None))
        if base is None or not effects.is_modified(owner):
            continue
        variable = type(owner).__name__ == "NewGlobalVariable"
        for key, end, child in _children(owner, effects):
            place = base if variable else base + end
            yield from _tensors(child, effects, (key,), place)


def _place(source: Any) -> str | None:
    """Where an object is outside of the function; None for one that it makes."""
    try:
        name = getattr(source, "name", None)
        return name() if callable(name) else name
    except NotImplementedError:  # Dynamo's name for what the function makes
        return None
