"""A worker's program as a table: a row for each job, and for each transfer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from ..ir import ops
from ..ir.graphs import Spec, arguments
from ..ir.meta import of_call
from .tables import byte_text, shorten, table

# What makes weights, and the argument that is the weights before it.
MADE: dict[Any, int] = {ops.update: 3, ops.renew: 1, ops.copy: 1, ops.correct: 4}
LONG = 10**12
HEADERS = "#|job|n|waits for|weights|sends|frees"


def program_table(
    program: fx.GraphModule,
    rank: int,
    sizes: bool = False,
    jobs: int | None = None,
    width: int | None = None,
    around: str | None = None,
) -> str:
    """One row per job in planned order, and per transfer of weights and gradients.

    waits for: values and the worker that each comes from. weights: where they are
    kept. sends: what, and to whom; of a sum, with whom. frees: what is let go after
    the job.

    sizes: bytes in the place of names: sends, bytes, and to whom (as many to each);
        frees, bytes of the values that are let go, by their shapes.
    jobs: how many rows, from the first; None for all. width: of a line at most.
    around: a task; the three rows before it and after it alone.
    """
    rows = _rows(program, sizes)
    if around is not None:
        places = (i for i, row in enumerate(rows) if row[1] == around)
        place = next(places, len(rows) - 1)  # the end of a step has no row
        rows = rows[max(place - 3, 0) : place + 4]
    shown = table(HEADERS, rows[:jobs], width=width)
    more = f"\nand {len(rows) - jobs} more" if jobs and jobs < len(rows) else ""
    return f"worker {rank}\n{shown}{more}"


def _rows(program: fx.GraphModule, sizes: bool) -> list[list[Any]]:
    seen: set[fx.Node] = set()
    tasks = enumerate(_tasks(program))
    return [[i, *_cells(nodes, seen, sizes)] for i, nodes in tasks]


def _tasks(program: fx.GraphModule) -> list[list[fx.Node]]:
    """The nodes of each task, in the order of the tasks' first own nodes."""
    tasks: dict[str, list[fx.Node]] = {}
    for node in program.graph.nodes:
        receives = node.target in (ops.recv, ops.fetch)
        if node.op not in ("placeholder", "output") and not receives:
            tasks.setdefault(of_call(node)["task"], []).append(node)
    return list(tasks.values())


def _cells(nodes: list[fx.Node], seen: set[fx.Node], sizes: bool) -> list[Any]:
    task, n = of_call(nodes[0])["task"], of_call(nodes[0])["n"]
    waits, weights = _reads(nodes, seen)
    sends = [node for node in nodes if node.target is ops.send]
    sent = _sent_bytes(sends) if sizes else _sent(sends)
    freed = [
        value
        for node in nodes
        if node.target is ops.free
        for value in node.all_input_nodes
        if value.target not in (ops.update, ops.renew)  # in the place of the old
    ]
    return [
        task,
        n if abs(n) < LONG else f"{n:.0e}",  # an update after all else
        shorten(list(dict.fromkeys(waits))),
        ", ".join(dict.fromkeys(weights)),
        ", ".join(filter(None, [sent, *_added_up(nodes, sizes)])),
        _freed_bytes(freed) if sizes else _freed(freed),
    ]


def _reads(nodes: list[fx.Node], seen: set[fx.Node]) -> tuple[list[str], list[str]]:
    """The values and the weights that a task reads, each with where it comes from.

    seen: the values received for tasks before, which are not waited for again.
    """
    task, inside = of_call(nodes[0])["task"], set(nodes)
    readers = [node for node in nodes if node.target is not ops.free]
    values = dict.fromkeys(v for node in readers for v in _inputs(node))
    waits, weights = [], []
    for value in values:
        if value in inside or value in seen:
            continue
        maker = of_call(value).get("task", task)
        if value.target is ops.recv:
            seen.add(value)
            waits.append(f"{maker} from {value.kwargs['source']}")
        elif value.target is ops.fetch:
            weights.append(f"{of_call(value)['group']} from {value.kwargs['source']}")
        elif "group" in of_call(value) and value.op == "placeholder":
            weights.append(f"{of_call(value)['group']} here")
        elif value.target is ops.update and value.args[2] is None:
            waits.append(f"{maker} here")  # it comes when it comes
        elif value.target is ops.copy and maker.startswith("read "):
            weights.append(f"{of_call(value)['group']} as {maker}")
        elif value.target in MADE:
            version, kept = _version(value), value.target is not ops.renew
            shown = f" v{version}" if version or kept else ""  # else the loop's own
            corrected = " corrected" if value.target is ops.correct else ""
            weights.append(f"{of_call(value)['group']}{shown}{corrected} here")
        elif maker != task:
            waits.append(f"{maker} here")
    return waits, weights


def _inputs(node: fx.Node) -> list[fx.Node]:
    """What a node reads; new weights only come after copies of the old."""
    if node.target not in MADE:
        return node.all_input_nodes
    old = node.args[MADE[node.target]]
    return [v for v in node.all_input_nodes if v is old or v.target is not ops.copy]


def _version(weights: fx.Node) -> int:
    """How many updates of a call weights that a worker keeps have seen."""
    if weights.target not in MADE:
        return 0
    before = weights.args[MADE[weights.target]]
    assert isinstance(before, fx.Node)
    copied = weights.target in (ops.copy, ops.correct)
    changes = not copied and weights.args[0] is not None
    return _version(before) + changes


def _sent(sends: Sequence[fx.Node]) -> str:
    """What is sent, and to which workers."""
    workers: dict[str, list[str]] = {}
    for node in sends:
        workers.setdefault(_name(node.args[0]), []).append(str(node.kwargs["to"]))
    return ", ".join(f"{name} to {'+'.join(to)}" for name, to in workers.items())


def _sent_bytes(sends: Sequence[fx.Node]) -> str:
    """How many bytes are sent, and to which workers."""
    workers: dict[fx.Node, list[str]] = {}
    for node in sends:
        workers.setdefault(node.all_input_nodes[0], []).append(str(node.kwargs["to"]))
    sizes: dict[str, int] = {}
    for value, to in workers.items():
        sizes["+".join(to)] = sizes.get("+".join(to), 0) + _bytes(value)
    return ", ".join(f"{byte_text(size)} to {to}" for to, size in sizes.items())


def _added_up(nodes: Sequence[fx.Node], sizes: bool) -> Iterator[str]:
    """What is added up with other workers, and with which."""
    for node in nodes:
        if node.target is ops.all_reduce:
            own, _, others = arguments(node)
            what = byte_text(_bytes(own)) if sizes else _name(own)
            yield f"{what} with {'+'.join(str(peer) for peer, *_ in others)}"


def _freed(values: Sequence[fx.Node]) -> str:
    names = dict.fromkeys(map(_name, values))
    return shorten([name for name in names if not name.startswith("job_")])


def _freed_bytes(values: Sequence[fx.Node]) -> str:
    size = sum(map(_bytes, dict.fromkeys(values)))
    return byte_text(size) if size else ""


def _bytes(value: fx.Node) -> int:
    specs: Sequence[Spec] = of_call(value).get("specs", ())  # not on nodes of a user
    return sum(spec.bytes for spec in specs)


def _name(value: object) -> str:
    """A value as tables show it."""
    assert isinstance(value, fx.Node)
    if value.target is ops.recv:
        return f"{of_call(value)['task']}'s"
    return value.name
