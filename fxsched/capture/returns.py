"""Where each output of Dynamo's graph goes: to the user, or into the model.

A model that gives an attribute a new tensor (`self.n = self.n + 1`) makes Dynamo return
that tensor from its graph and store it after the call. This file reads Dynamo's records
of what the function returns and stores; dynamo.py hands them in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx

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
        for path, name in _tensors(value, effects, ()):
            labels.setdefault(name, _label(path))
    stored: dict[str, list[str]] = {}
    for source, name in _stores(effects):
        stored.setdefault(name, []).append(source)
    outputs: Any = gm.graph.output_node().args[0]
    returns = []
    for node in outputs:
        name = node.name if isinstance(node, fx.Node) else ""
        places = tuple(stored.get(name, ()))
        old = (_before(place, sources, inputs, scope) for place in places)
        replaced = tuple(dict.fromkeys(i for i in old if i is not None))
        returns.append(Returned(labels.get(name), places, replaced))
    return tuple(returns)


def _label(path: Path) -> int | str:
    if len(path) > 1:
        return ".".join(map(str, path))
    return path[0] if path else 0


def _before(
    source: str, sources: Sequence[str], inputs: Sequence[Any], scope: dict[str, Any]
) -> int | None:
    """The input of the graph that a place held before the call."""
    if source in sources:
        return sources.index(source)
    try:
        old = eval(source, scope)
    except (NameError, AttributeError, LookupError, TypeError):  # it is a new place
        return None
    if not isinstance(old, Tensor):
        return None
    return next((i for i, value in enumerate(inputs) if value is old), None)


def _tensors(value: Any, effects: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """The graph's values in a value of Dynamo's: their paths in it, and their names."""
    value = value.unwrap() if hasattr(value, "unwrap") else value
    proxy = vars(value).get("proxy")
    node = getattr(proxy, "node", None)
    if isinstance(node, fx.Node):
        yield path, node.name
        return
    for key, child in _children(value, effects):
        if len(path) < 20:  # a list may hold itself
            yield from _tensors(child, effects, (*path, key))


def _children(value: Any, effects: Any) -> Iterator[tuple[int | str, Any]]:
    """Items and attributes of a value of Dynamo's, by key."""
    members = vars(value)
    yield from _items(value)
    fields: tuple[str, ...] = getattr(members.get("value"), "_fields", ())
    for name, inner in members.items():
        # what a user's class has of list, tuple or dict
        if name.endswith("_vt") and hasattr(inner, "__dict__"):
            for key, child in _children(inner, effects):
                if isinstance(key, int) and key < len(fields):
                    key = fields[key]
                yield key, child
    yield from (effects.store_attr_mutations.get(value) or {}).items()


def _items(value: Any) -> Iterator[tuple[int | str, Any]]:
    """Of a dict, list or tuple of Dynamo's."""
    items = vars(value).get("items")
    if isinstance(items, dict):
        yield from ((_constant(key), child) for key, child in items.items())
    elif isinstance(items, (list, tuple)):
        yield from enumerate(items)


def _constant(key: Any) -> int | str:
    constant = getattr(key, "vt", key)
    try:
        label = constant.as_python_constant()
    except NotImplementedError:
        return str(key)
    return label if isinstance(label, (int, str)) else str(label)


def _stores(effects: Any) -> Iterator[tuple[str, str]]:
    """What the function stores outside of itself: the place, and the value's name."""
    for owner in list(effects.id_to_variable.values()):
        base = _place(getattr(owner, "source", None))
        if base is None or not effects.is_modified(owner):
            continue
        attributes = effects.store_attr_mutations.get(owner) or {}
        for name, value in attributes.items():
            place = f"{base}.{name}"
            if type(owner).__name__ == "NewGlobalVariable":
                place = base
            yield from _stored(place, value, effects)
        for key, value in _items(owner):
            yield from _stored(f"{base}[{key!r}]", value, effects)


def _place(source: Any) -> str | None:
    """Where an object is outside of the function; None for one that it makes."""
    try:
        name = getattr(source, "name", None)
        return name() if callable(name) else name
    except NotImplementedError:  # Dynamo's name for what the function makes
        return None


def _stored(place: str, value: Any, effects: Any) -> Iterator[tuple[str, str]]:
    """The graph's values in what is stored in one place."""
    for path, name in _tensors(value, effects, ()):
        yield place + "".join(f"[{key!r}]" for key in path), name
