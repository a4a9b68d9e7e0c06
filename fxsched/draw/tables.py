"""Everything that is printed: stages, programs, plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import networkx as nx
from tabulate import tabulate
from torch import fx

from ..clock.event_loop import Timeline
from ..clock.stage_graph import run_stages, step_seconds, worker_bytes
from ..clock.worker_stats import Worker
from ..ir import ops
from ..ir.graphs import Group
from ..jobs import Job, Schedule

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
            _sends(stages, s),
        )
        for s in sorted(stages)
    ]
    headers = ("stage", "modules", "parameters", "FLOPs", "sends per microbatch")
    return tabulate(rows, headers, disable_numparse=True)


def worker_table(workers: Sequence[Worker], latency: float) -> str:
    """A row for each worker of a simulated step; equal ones share a row."""
    same: dict[Worker, list[int]] = {}
    for number, record in enumerate(workers):
        same.setdefault(record, []).append(number)
    rows = [
        (
            ranges(numbers),
            f"{100 * record.busy / (latency or 1.0):.1f} %",
            f"{record.peak_activations}",
            "" if record.peak_bytes is None else _bytes(record.peak_bytes),
            f"{record.weights_held}",
            f"{record.weight_fetches}",
            f"{record.activations_received}",
            f"{record.activations_sent}",
            f"{record.gradients_returned}",
        )
        for record, numbers in same.items()
    ]
    headers = "workers|busy|activations|bytes|weights|fetches|received|sent|returned"
    used = [i for i in range(9) if any(row[i] for row in rows)]
    return tabulate(
        [[row[i] for i in used] for row in rows],
        [headers.split("|")[i] for i in used],
        disable_numparse=True,
        colalign=["right"] * len(used),
    )


def verify_table(rows: Sequence[Sequence[str]]) -> str:
    """A row for each value that eager PyTorch and a plan have both computed."""
    headers = ["", "eager", "plan", "difference", "allowed", ""]
    aligned = ["left", *["right"] * 4, "left"]
    return tabulate(rows, headers, disable_numparse=True, colalign=aligned)


def comparison_table(rows: Sequence[Sequence[str]]) -> str:
    """A row for each schedule's simulated step."""
    headers = "schedule|stages|step|bubble|span bubble|throughput|activations|weights"
    headers += "|fetches|sent"
    return tabulate(
        rows,
        headers.split("|"),
        disable_numparse=True,
        colalign=["left"] + ["right"] * (len(rows[0]) - 1),
    )


def search_table(rows: Sequence[tuple[Any, ...]], in_bytes: bool) -> str:
    """A row for each schedule that a search compared; see contest.py."""
    headers = "schedule|parameters|stages|step|bubble|span|span bubble|"
    headers += "memory|" if in_bytes else "activations|"
    write = _bytes if in_bytes else "{:.4g}".format
    return tabulate(
        [(*row[:7], write(row[7]), row[8]) for row in rows],
        headers.split("|"),
        disable_numparse=True,
        colalign=["left"] * 2 + ["right"] * 6 + ["left"],
    )


def table1_text(rows: Sequence[Sequence[str]]) -> str:
    """A row for each formula and the value that a simulation finds."""
    headers = "scheme|setting|quantity|formula|value|simulated"
    return tabulate(rows, headers.split("|"), disable_numparse=True)


def right_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns of numbers and jobs, aligned to the right."""
    return tabulate(
        [[str(cell) for cell in row] for row in rows],
        headers,
        disable_numparse=True,
        colalign=["right"] * len(headers),
    )


def ranges(numbers: Sequence[int]) -> str:
    """Increasing numbers as they fit: 0..3, 8, 10..12."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return _shorten(["..".join(map(str, run)) for run in runs], 32)


def explain_text(schedule: Schedule, stages: nx.DiGraph[int]) -> str:
    """The stages with their workers, work and memory; where the step's time goes."""
    whole = sum(d["forward"] + d["backward"] for _, d in stages.nodes(data=True)) or 1.0
    rows = []
    for s in sorted(stages):
        data = stages.nodes[s]
        workers = {
            schedule.place(Job(s, b, d)).compute
            for b in range(schedule.microbatches)
            for d in schedule.directions
        }
        rows.append(
            (
                s,
                _shorten(data["modules"]),
                _list(sorted(workers)),
                f"{100 * (data['forward'] + data['backward']) / whole:.1f} %",
                f"{data['forward'] * 1e3:.3g} + {data['backward'] * 1e3:.3g}",
                f"{data['parameters']:,}",
                _bytes(data["weights"]),
                _bytes(data["held"]),
                _sends(stages, s),
            )
        )
    headers = "stage|modules|workers|work|F + B ms|parameters|weights|held"
    headers += "|sends per microbatch"
    events = run_stages(schedule, stages)
    return "\n\n".join(
        (
            f"{schedule}, {len(stages)} stages",
            tabulate(rows, headers.split("|"), disable_numparse=True),
            _load_table(schedule, stages, events),
            _limits(schedule, stages, events),
        )
    )


def _load_table(schedule: Schedule, stages: nx.DiGraph[int], events: Timeline) -> str:
    step = step_seconds(events) or 1.0
    busy = _busy(schedule, events)
    memory = worker_bytes(schedule, stages, events)
    run: list[set[int]] = [set() for _ in range(schedule.workers)]
    for event in events:
        run[event.worker].add(event.job.stage)
    rows = [
        (
            w,
            _shorten([str(s) for s in sorted(run[w])]),
            f"{100 * busy[w] / step:.1f} %",
            _bytes(memory[w]),
        )
        for w in range(schedule.workers)
    ]
    return tabulate(rows, ("worker", "stages", "busy", "memory"), disable_numparse=True)


def _busy(schedule: Schedule, events: Timeline) -> list[float]:
    busy = [0.0] * schedule.workers
    for event in events:
        busy[event.worker] += event.end - event.start
    return busy


def _limits(schedule: Schedule, stages: nx.DiGraph[int], events: Timeline) -> str:
    """Predicted time, bubble, and the largest of what keeps workers from working."""
    near = stages.copy()
    for edge in near.edges:
        near.edges[edge]["seconds"] = 0.0
    step = step_seconds(events) or 1.0
    at_once = min(step, step_seconds(run_stages(schedule, near)))
    busy = _busy(schedule, events)
    most, mean = max(busy), sum(busy) / len(busy)
    slowest = busy.index(most)
    advice = {
        "unequal workers": f"worker {slowest} has the most to do: cut finer "
        "(more stages), or place its stages elsewhere",
        "waiting for other stages": "filling and draining the pipeline: more "
        "microbatches, or more stages a worker",
        "transfers": "values on their way: cut where fewer bytes cross, or use more "
        "microbatches in flight",
    }
    lost = {
        "unequal workers": most - mean,
        "waiting for other stages": max(at_once - most, 0.0),
        "transfers": step - max(at_once, most),
    }
    worst = max(lost, key=lost.__getitem__)
    limit = f"what limits the step: {worst}; {advice[worst]}"
    if lost[worst] < 0.02 * step:
        limit = "what limits the step: work; every worker is busy nearly all the time"
    return "\n".join(
        (
            f"predicted step: {step * 1e3:.3g} ms, of which the workers are busy "
            f"{100 * mean / step:.1f} % (bubble {100 - 100 * mean / step:.1f} %)",
            "idle: "
            + ", ".join(f"{what} {100 * t / step:.1f} %" for what, t in lost.items()),
            limit,
        )
    )


def _sends(stages: nx.DiGraph[int], stage: int) -> str:
    return ", ".join(
        f"{to}: {_bytes(data['bytes'])}"
        for _, to, data in stages.edges(stage, data=True)
    )


def plan_head(
    schedule: Schedule,
    stages: nx.DiGraph[int],
    groups: Sequence[Group],
    notes: Iterable[str],
) -> list[str]:
    """A plan but for its programs: a summary, notes, the stages and the weights."""
    kept = [
        (i, _shorten(group.names), _list(group.owners), _list(group.stages))
        for i, group in enumerate(groups)
    ]
    headers = ("weights", "tensors", "kept by", "read by stages")
    return [
        f"{schedule}, {len(stages)} stages",
        *notes,
        stage_table(stages),
        tabulate(kept, headers, disable_numparse=True),
    ]


def plan_text(head: Sequence[str], programs: Sequence[fx.GraphModule]) -> str:
    """What plan_head gives, how many messages there are, and all workers' tables."""
    messages = sum(node.target is ops.send for p in programs for node in p.graph.nodes)
    tables = [program_table(program, rank) for rank, program in enumerate(programs)]
    summary = f"{head[0]}, {messages} transfers a step"
    return "\n\n".join((summary, *head[1:], *tables))


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
