"""A worker's program as straight Python: one line for each thing it does.

Bundles are taken apart while the source is written: a stage's call becomes one line
that calls its flat graph with plain variables, and what is handed from a line to the
next is a variable, let go of after its last use.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx

from ..ir import ops
from ..ir.graphs import arguments, result
from ..ir.meta import of_call
from ..transport.wire_format import AllReduce, Parcel
from .device_graphs import DeviceGraphs, GraphFunction
from .graph_functions import FlatFunction, runner

Expression = str | tuple[Any, ...]  # a variable or constant, or a tuple of expressions
VARIABLE = re.compile(r"\bv\d+\b")


class PythonSource:
    """Lines of Python, and the objects that they name.

    lines: text and the task that it belongs to. names: what the text calls by name.
    graphs: captures flat graphs, if they are. weights: bundles that don't move.
    """

    def __init__(self, gm: fx.GraphModule, graphs: DeviceGraphs | None = None) -> None:
        self.gm, self.graphs = gm, graphs
        self.weights: set[str] = set()
        self.lines: list[tuple[str, str]] = []
        self.names: dict[str, Any] = {}
        self.known: dict[int, str] = {}  # names of objects by their id
        self.parts: dict[tuple[str, int, int], str] = {}
        self.calls: dict[str, FlatCall] = {}  # of flat graphs, by what they make
        self.called: dict[int, FlatCall] = {}  # by their first line
        self.count = 0
        self.task = ""

    def variable(self) -> str:
        """A new name for a value."""
        self.count += 1
        return f"v{self.count}"

    def name(self, value: Any, name: str | None = None) -> str:
        """A name for an object that has no literal."""
        if id(value) not in self.known:
            self.known[id(value)] = name or f"c{len(self.known)}"
            self.names[self.known[id(value)]] = value
        return self.known[id(value)]

    def parcel(self, parcel: Parcel | AllReduce) -> str:
        """The name of a message's parcel, or of a sum's."""
        return self.name(parcel, f"m{parcel.tag}")

    def line(self, text: str) -> None:
        """Adds a line, which is of the present task."""
        self.lines.append((text, self.task))

    def make(self, text: str) -> str:
        """A new variable with what an expression gives."""
        new = self.variable()
        self.line(f"{new} = {text}")
        return new

    def express(self, value: Any, env: dict[fx.Node, Expression]) -> Expression:
        """A node's argument as an expression."""
        if isinstance(value, fx.Node):
            return env[value]
        if isinstance(value, (tuple, list)):
            return tuple(self.express(each, env) for each in value)
        if isinstance(value, dict):
            items = (
                f"{k!r}: {text_of(self.express(v, env))}" for k, v in value.items()
            )
            return f"{{{', '.join(items)}}}"
        if _is_literal(value):
            return repr(value)
        return self.name(value)

    def node(
        self, node: fx.Node, env: dict[fx.Node, Expression], whole: bool = False
    ) -> Expression:
        """Writes what a node does; gives the expression of its value.

        whole: the source is of all tasks, so that one may use what another left.
        """
        args = [self.express(arg, env) for arg in node.args]
        if node.op == "call_module":
            stage = self.gm.get_submodule(str(node.target))
            job = "job" in of_call(node) and "forward" not in vars(stage)
            if job and isinstance(stage, fx.GraphModule):
                return self.stage(stage, args)
            return self.call(self.name(stage), node, args, env)
        if node.op == "get_attr":
            return self.name(operator.attrgetter(str(node.target))(self.gm))
        if node.op == "call_method":
            return self.call(f"{text_of(args[0])}.{node.target}", node, args[1:], env)
        if node.target is operator.getitem:
            return item(args[0], arguments(node)[1])
        if node.target is ops.bundle:
            return tuple(args)
        if node.target is ops.rows and whole:
            return self.rows(*arguments(node), env=env)
        if node.target is ops.credit:
            return self.name(TOKEN)
        if node.target is ops.accumulate:
            gradients = node.all_input_nodes[-1]
            readers = [user for user in gradients.users if user.target is not ops.free]
            total, new = args
            # of an earlier job they wait for their turn, as what they are added to does
            fresh = gradients.target is operator.getitem
            fresh = fresh and of_call(gradients).get("task") == of_call(node).get(
                "task"
            )
            fresh = fresh and not any(
                user.target is ops.finite for user in gradients.all_input_nodes[0].users
            )
            self.accumulate(total, new, alone=fresh and readers == [node])
            return args[0]
        if node.target is ops.loss_gradient and len(args) == 2:
            (spec,) = of_call(node)["specs"]
            full = torch.full(
                spec.shape, arguments(node)[1], dtype=spec.dtype, device=spec.device
            )
            return self.name(full)
        return self.call(self.name(node.target), node, args, env)

    def call(
        self,
        function: str,
        node: fx.Node,
        args: Sequence[Expression],
        env: dict[fx.Node, Expression],
    ) -> Expression:
        """A node's call by the name of its function."""
        texts = [text_of(arg) for arg in args]
        texts += [
            f"{k}={text_of(self.express(v, env))}" for k, v in node.kwargs.items()
        ]
        return self.make(f"{function}({', '.join(texts)})")

    def stage(self, stage: fx.GraphModule, args: Sequence[Expression]) -> Expression:
        """A stage's call: its flat graphs with bundles taken apart."""
        env: dict[fx.Node, Expression] = {}
        values = iter(args)
        for node in stage.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(values)
            elif node.op == "output":
                break
            elif node.target is operator.getitem:
                env[node] = item(env[node.args[0]], arguments(node)[1])
            elif node.op == "call_module":
                flat = stage.get_submodule(str(node.target))
                env[node] = self.flat(flat, [env[a] for a in node.args])
            else:
                env[node] = self.node(node, env)
        return self.express(result(stage), env)

    def rows(
        self,
        value: fx.Node,
        microbatch: int,
        microbatches: int,
        dim: int = 0,
        *,
        env: dict[fx.Node, Expression],
    ) -> Expression:
        """A microbatch's part of a value, which is parted once for all of them."""
        whole = text_of(env[value])
        key = (whole, microbatches, dim)
        if key not in self.parts:
            size = f"{whole}.shape[{dim}] // {microbatches}"
            self.parts[key] = self.make(f"{whole}.split({size}, {dim})")
        return f"{self.parts[key]}[{microbatch}]"

    def flat(self, flat: Any, args: Sequence[Expression]) -> Expression:
        """The call of a flat graph, without what calling a module costs."""
        if isinstance(flat, fx.GraphModule) and not _hooked(flat):
            results = tuple(self.variable() for _ in result(flat))
            box = self.make("")
            call = FlatCall(
                len(self.lines) - 1, box, flat, tuple(map(text_of, args)), results
            )
            self.line("")
            self._call(call)
            return results
        texts = ", ".join(map(text_of, args))
        count = getattr(flat, "outputs", None)
        if count is None:  # some module of the user's
            return self.make(f"{self.name(flat)}({texts})")
        results = tuple(self.variable() for _ in range(count))
        if self.graphs is not None and not flat.random:
            function = self._captured(flat, lambda given: flat(*given), args)
            self.line(f"{_targets(results)}{self.name(function)}([{texts}])")
            return results
        if id(flat) not in self.known:  # flat.forward is a new object each time
            self.known[id(flat)] = self.name(flat.forward)
        self.line(f"{_targets(results)}{self.known[id(flat)]}({texts})")
        return results

    def accumulate(self, total: Expression, new: Expression, alone: bool) -> None:
        """Adds gradients to a sum: in the graph that makes them, if it can.

        alone: whether this job makes them, and nothing else reads them, such as a pass
            of the user's.
        """
        call = self.calls.get(new[0]) if isinstance(new, tuple) and new else None
        if call is None or not alone or any(name not in call.results for name in new):
            names = (text_of(total), text_of(new))
            self.line(f"{self.name(torch._foreach_add_)}({', '.join(names)})")
            return
        added = tuple(call.results.index(name) for name in new)
        sums = tuple(text_of(item(total, i)) for i in range(len(new)))
        self._call(
            call._replace(
                arguments=(*call.arguments, *sums), added=(*call.added, *added)
            )
        )

    def _captured(
        self, flat: object, run: FlatFunction, arguments: Sequence[Expression]
    ) -> GraphFunction:
        """A flat graph's function, which reads weights where they are."""
        texts = enumerate(map(text_of, arguments))
        kept = {i: each for i, each in texts if each.rpartition("[")[0] in self.weights}
        assert self.graphs is not None
        return self.graphs.function(flat, run, kept)

    def _call(self, call: FlatCall) -> None:
        """Takes note of a call of a flat graph, in the place of what it was before."""
        self.called[call.line] = call
        self.calls.update(dict.fromkeys(call.variables, call))

    def written(self) -> list[tuple[str, str]]:
        """All lines, each letting go of what none after it needs."""
        runs: dict[tuple[int, tuple[int, ...]], FlatFunction] = {}
        for call in self.called.values():
            key = id(call.flat), call.added
            if key not in runs:
                runs[key] = runner(call.flat, call.added)
            function = runs[key]
            if self.graphs is not None:
                given = call.arguments[: len(call.arguments) - len(call.added)]
                graph = self._captured(call.flat, runner(call.flat), given)
                function = partial(graph, plain=function, added=call.added)
            run = self.name(function)
            box = f"{call.box} = [{', '.join(call.arguments)}]"
            call_text = f"{_targets(call.variables)}{run}({call.box})"
            for line, text in enumerate((box, call_text), call.line):
                self.lines[line] = (text, self.lines[line][1])
        return let_go(self.lines)


class FlatCall(NamedTuple):
    """The two lines that call a flat graph: what it is given, in a list, and makes.

    added: positions of what it makes that it adds to sums, the last that it is given.
    """

    line: int
    box: str
    flat: fx.GraphModule
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    added: tuple[int, ...] = ()

    @property
    def variables(self) -> list[str]:
        """The variables that it makes."""
        return [v for i, v in enumerate(self.results) if i not in self.added]


def _targets(names: Sequence[str]) -> str:
    return "".join(f"{name}, " for name in names).strip() + " = " * bool(names)


def _hooked(module: torch.nn.Module) -> bool:
    """Whether a call of it does more than its graph says."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks) or "forward" in vars(module)


def _is_literal(value: object) -> bool:
    """Whether Python reads repr(value) as the same value, and finds no variable in it;
    not so inf, nan and enums."""
    if isinstance(value, float):
        return type(value) is float and math.isfinite(value)
    if isinstance(value, str):
        return type(value) is str and not VARIABLE.search(value)
    return value is None or type(value) in (bool, int)


TOKEN = torch.empty(0)


def item(value: Expression, index: int) -> Expression:
    """An expression for one of the values of a tuple."""
    return value[index] if isinstance(value, tuple) else f"{value}[{index}]"


def text_of(value: Expression) -> str:
    """An expression as Python text."""
    if isinstance(value, str):
        return value
    return "(" + "".join(text_of(each) + ", " for each in value) + ")"


def let_go(lines: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The same lines; each lets go of the variables that none after it names."""
    seen: set[str] = set()
    texts = []
    for text, task in reversed(lines):
        last = set(VARIABLE.findall(text)) - seen
        seen |= last
        if last:
            targets = " = ".join(sorted(last))
            text = f"{text}; {targets} = None"
        texts.append((text, task))
    return texts[::-1]


def compiled(
    name: str, head: str, lines: Sequence[tuple[str, str]], names: dict[str, Any]
) -> tuple[str, Callable[..., Any]]:
    """The function whose body the lines are, from line 2 of the file that its errors
    name; and that file's name."""
    body = "\n    ".join(text for text, _ in lines) or "pass"
    space, file = dict(names), f"<fxsched {name}>"
    exec(compile(f"def run({head}):\n    {body}\n", file, "exec"), space)
    run: Callable[..., Any] = space.pop("run")
    return file, run
