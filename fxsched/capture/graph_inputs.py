"""The inputs of a traced graph, as the user names them.

A tensor is looked for among the parameters and buffers of the module that it was
reached through, a node's module among the modules of that one. How Dynamo writes the
way there, and whether it finds a short one, does not matter.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence, Set
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ..ir.graphs import Spec
from ..ir.meta import of_node
from ..ir.modes import casts

Path = tuple[str, ...]


class Origin(NamedTuple):
    """Where an input of the traced graph comes from.

    name: the user's: layers.0.weight as in named_parameters(), x or batch['x'] for an
        argument, self.tables[0] for other tensors. No two inputs have the same.
    argument: whether it is an argument of the call; else it is state, reached through a
        module, the object of a method, a closure or a global.
    registered: whether it is a parameter or buffer of a module that is called.
    also: the name of what else it is, if it's an argument and state at once, or "".
    """

    name: str
    argument: bool
    registered: bool
    also: str = ""


class Origins:
    """The origins of a call's inputs, and the names of its modules.

    scope: what expressions such as L['self'].table are evaluated in.
    outside: variables of the frame, so written, that are no arguments of the call.
    paths: for each input, the ways that it was reached by, each the expressions from a
        variable of the frame on: L['self'], L['self']._modules, L['self']._modules['a']
    values: the inputs.
    """

    def __init__(
        self,
        scope: dict[str, Any],
        outside: Set[str],
        paths: Sequence[Sequence[Path]],
        values: Sequence[Any],
    ) -> None:
        self.guards = outside
        self._module = cache(partial(_module_at, scope=scope))
        self._registry = cache(registry)
        first = [each for ways in paths for each in self._through(ways[0])[:1]]
        if not first:  # no state at all
            first = [f"L[{name!r}]" for name in scope["L"]]
        self.roots: dict[nn.Module, str] = {}  # where each was found first
        for expression in first:
            module = self._module(expression)
            if module is not None:
                self.roots.setdefault(module, expression)
        self.inputs = _unique(list(map(self._origin, paths, values)))

    def module_name(self, stack: Mapping[str, tuple[Any, ...]]) -> str:
        """The dotted name of the innermost module that a node was called in, or ''.

        stack: where each module around the call was found.
        """
        where = str([*stack.values()][-1][0]) if stack else ""
        path = _shorten(where)
        for root, expression in self.roots.items():
            start = _shorten(expression)
            if path == start or path.startswith((start + ".", start + "[")):
                return self._under(root, path[len(start) :].removeprefix("."))
        return plain(where)

    def _through(self, path: Path) -> list[str]:
        """The expressions on the way to an input that are modules."""
        return [each for each in path[:-1] if self._module(each) is not None]

    def _under(self, root: nn.Module, name: str) -> str:
        """The name of what is in a root; that of an only root goes without saying."""
        prefix = plain(self.roots[root]) if len(self.roots) > 1 else ""
        return ".".join(filter(None, [prefix, name]))

    def _origin(self, paths: Sequence[Path], value: object) -> Origin:
        """Of all that an input is: a registered tensor, an argument, or what else."""
        ways = [self._way(path, value) for path in paths]
        first = min(ways, key=lambda way: (not way.registered, not way.argument))
        states = [way.name for way in ways if not way.argument]
        also = states[0] if first.argument and states else ""
        return first._replace(also=also)

    def _way(self, path: Path, value: object) -> Origin:
        through = self._through(path)
        for expression in through or self.roots.values():
            module = self._module(expression)
            assert module is not None, "it is on the way"
            name = self._registry(module).get(id(value))
            if name is not None:
                inside = module in self.roots
                full = self._under(module, name) if inside else plain(expression, name)
                return Origin(full, argument=False, registered=True)
        variable = path[0].startswith("L[") and path[0] not in self.guards
        return Origin(plain(path[-1]), variable and not through, registered=False)


def evaluated(expression: str, scope: dict[str, Any]) -> Any:
    """What an expression of Dynamo's stands for; None if it can't be told."""
    try:
        return eval(expression, scope)
    except (ArithmeticError, AttributeError, LookupError, NameError, SyntaxError):
        return None
    except (TypeError, ValueError):
        return None


def _module_at(expression: str, scope: dict[str, Any]) -> nn.Module | None:
    value = evaluated(expression, scope)
    return value if isinstance(value, nn.Module) else None


def registry(module: nn.Module) -> dict[int, str]:
    """The first name of each parameter and buffer below a module, by its id."""
    names: dict[int, str] = {}
    for each in (nn.Module.named_parameters, nn.Module.named_buffers):
        for name, tensor in each(module, remove_duplicate=False):
            names.setdefault(id(tensor), name)
    return names


def plain(expression: str, *more: str) -> str:
    """L['self']._modules['a'].tables[0] as self.a.tables[0].

    Dynamo's own names for globals of other functions may hold addresses, which are
    others in each process.
    """
    text = re.sub(r"^G\['___unnamed_scope_\w*'\]", "G", _shorten(expression))
    text = re.sub(r"^G\['___weakref_\w*'\]\(\)", "G['object']", text)
    text = re.sub(r"^[LG]\['(?:__import_)?([^']*)'\]", r"\1", text)
    return ".".join([text, *more])


def _shorten(expression: str) -> str:
    """L['self'].__dict__['_modules']['a']._parameters['b'] as L['self'].a.b."""
    text = re.sub(r"\.__dict__\['([^']*)'\]", r".\1", expression)
    return re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", text)


def _unique(origins: Sequence[Origin]) -> list[Origin]:
    """The same with a number behind a name that another has; parameters and buffers
    keep theirs."""
    unique, taken = list(origins), set[str]()
    for i in sorted(range(len(origins)), key=lambda i: not origins[i].registered):
        name, number = origins[i].name, 1
        while name in taken:
            number += 1
            name = f"{origins[i].name} ({number})"
        taken.add(name)
        unique[i] = origins[i]._replace(name=name)
    return unique


def call_text(gm: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """A call in the user's words: its tensors with their shapes, and its modes."""
    tensors = [
        f"{origin_of(node).name} {Spec.of(value)}"
        for node, value in zip(placeholders(gm), inputs, strict=True)
        if isinstance(value, Tensor) and origin_of(node).argument
    ]
    modes = ["with gradients" if torch.is_grad_enabled() else "without gradients"]
    modes += [f"{kind} autocast to {dtype}" for kind, dtype in casts()]
    return ", ".join(tensors + modes)


def placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    """The inputs of a graph, in order."""
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def symbol_of(size: object) -> Any:
    """The sympy symbol of a symbolic size, or None if it's a number or expression."""
    if not isinstance(size, torch.SymInt):
        return None
    expression = size.node.expr
    return expression if expression.is_Symbol else None


def origin_of(node: fx.Node) -> Origin:
    """Where an input comes from, as dynamo.py or exported_graph.py wrote it down."""
    origin: Origin = of_node(node)["origin"]
    return origin


def state_of(gm: fx.GraphModule) -> dict[str, int]:
    """The positions of inputs that are no arguments of the call, by name."""
    origins = enumerate(map(origin_of, placeholders(gm)))
    return {origin.name: i for i, origin in origins if not origin.argument}


def text_of(gm: fx.GraphModule) -> str:
    """What tells a graph from others: its nodes, where inputs come from, where outputs
    go, and which tensors are constants of it."""
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    names = (str(node.target) for node in gm.graph.find_nodes(op="get_attr"))
    values = (getattr(gm, name, None) for name in names)
    constants = [str(id(value)) for value in values if isinstance(value, Tensor)]
    origins = [str(origin_of(node)) for node in placeholders(gm)]
    text = [*origins, *map(str, graphs), *constants, str(gm.meta["returns"])]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()
