"""Everything that is printed: stages, programs, plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import networkx as nx
from tabulate import tabulate
from torch import fx

from . import ops
from .graphs import Group
from .jobs import Schedule

HEADERS = ("#", "job", "n", "waits for", "weights", "sends", "frees")


def program_table(program: fx.GraphModule, rank: int) -> str:
    """One row per job in planned order, and per transfer of weights and gradients.

    waits for: values and the worker that each comes from. weights: where they are
    kept. sends: what, and to whom. frees: what is let go after the job.
    """
    seen: set[fx.Node] = set()
    rows = [_row(i, nodes, seen) for i, nodes in enumerate(_tasks(program))]
    return f"worker {rank}\n" + tabulate(rows, HEADERS, disable_numparse=True)


def _tasks(program: fx.GraphModule) -> list[list[fx.Node]]:
    """The nodes of each task, in the order of the tasks' first own nodes."""
    tasks: dict[str, list[fx.Node]] = {}
    for node in program.graph.nodes:
        receives = node.target in (ops.recv, ops.fetch)
        if node.op not in ("placeholder", "output") and not receives:
            tasks.setdefault(node.meta["task"], []).append(node)
    return list(tasks.values())


def _row(position: int, nodes: list[fx.Node], seen: set[fx.Node]) -> tuple[Any, ...]:
    inside = set(nodes)
    read = dict.fromkeys(
        p
        for n in nodes
        if n.target is not ops.free
        for p in n.all_input_nodes
        if p not in inside
    )
    waits, weights = [], []
    for value in read:
        if value.target is ops.recv:
            if value in seen:
                continue
            seen.add(value)
            waits.append(f"{value.meta['task']} from {value.kwargs['source']}")
        elif value.target is ops.fetch:
            weights.append(f"{value.meta['group']} from {value.kwargs['source']}")
        elif "group" in value.meta and value.op == "placeholder":
            weights.append(f"{value.meta['group']} here")
        elif value.meta.get("task", nodes[0].meta["task"]) != nodes[0].meta["task"]:
            waits.append(f"{value.meta['task']} here")
    sends: dict[str, list[int]] = {}
    for node in nodes:
        if node.target is ops.send:
            to: Any = node.kwargs["to"]
            sends.setdefault(_what(node.args[0]), []).append(to)
    sent = [f"{what} to {_list(workers)}" for what, workers in sends.items()]
    frees = [_what(v) for n in nodes if n.target is ops.free for v in n.all_input_nodes]
    return (
        position,
        nodes[0].meta["task"],
        nodes[0].meta["n"],
        _shorten(list(dict.fromkeys(waits))),
        ", ".join(dict.fromkeys(weights)),
        ", ".join(sent),
        _shorten([f for f in dict.fromkeys(frees) if not f.startswith("job_")]),
    )


def _what(value: object) -> str:
    """The name of a value as tables show it."""
    assert isinstance(value, fx.Node)
    if value.target is ops.recv:
        return f"{value.meta['task']}'s"
    return value.name


def _list(workers: Sequence[int]) -> str:
    return "+".join(map(str, workers))


def stage_table(stages: nx.DiGraph[int]) -> str:
    """The stages: modules, share of FLOPs, parameters, and bytes to each reader."""
    flops = {s: stages.nodes[s]["flops"] for s in stages}
    whole = sum(flops.values()) or 1
    rows = [
        (
            s,
            _shorten(stages.nodes[s]["modules"]),
            f"{stages.nodes[s]['parameters']:,}",
            f"{100 * flops[s] / whole:.1f} %",
            ", ".join(
                f"{to}: {_bytes(data['bytes'])}"
                for _, to, data in stages.edges(s, data=True)
            ),
        )
        for s in sorted(stages)
    ]
    headers = ("stage", "modules", "parameters", "FLOPs", "sends per microbatch")
    return tabulate(rows, headers, disable_numparse=True)


def plan_text(
    schedule: Schedule,
    stages: nx.DiGraph[int],
    programs: Sequence[fx.GraphModule],
    groups: Sequence[Group],
    notes: Iterable[str],
) -> str:
    """A summary, the stages, the weights and the tables of all workers."""
    kept = [
        (i, _shorten(group.names), _list(group.owners), _list(group.stages))
        for i, group in enumerate(groups)
    ]
    messages = sum(node.target is ops.send for p in programs for node in p.graph.nodes)
    parts = [
        f"{schedule}, {len(stages)} stages, {messages} transfers a step",
        *notes,
        stage_table(stages),
        tabulate(
            kept,
            ("weights", "tensors", "kept by", "read by stages"),
            disable_numparse=True,
        ),
        *(program_table(program, rank) for rank, program in enumerate(programs)),
    ]
    return "\n\n".join(parts)


def _shorten(names: Sequence[str], limit: int = 48) -> str:
    """Names as they fit: all of them, or the first and the last."""
    text = ", ".join(names)
    if len(text) <= limit or len(names) < 3:
        return text
    return f"{names[0]} .. {names[-1]} ({len(names)})"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
