"""Graphs as text for golden files: one line a node, no addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxsched.ir.facts import facts
from fxsched.ir.graphs import Role, Spec, name_of
from fxsched.ir.step import Message, Op, Step
from fxsched.jobs.job import Direction, Job, Placement


def stage_count_text(gm: fx.GraphModule) -> list[str]:
    """What assign_stages makes."""
    stages = {node.meta["stage"] for node in gm.graph.nodes if "stage" in node.meta}
    return [f"stage_count = {len(stages)}"]


def pieces_text(gm: fx.GraphModule) -> list[str]:
    """What shard_stages makes: stages of pieces, as the stages of jobs print."""
    pieces = (str(Job(piece, 0, Direction.FORWARD)) for piece in facts(gm).pieces)
    return [f"stage {i}: {job}" for i, job in enumerate(pieces)]


def groups_text(gm: fx.GraphModule) -> list[str]:
    """What split_stages says of the model."""
    stages = facts(gm).stages
    lines = [f"groups = {show(list(facts(gm).groups))}"]
    lines += [f"stage {s}: {show(dict(data))}" for s, data in stages.nodes(data=True)]
    lines += [f"stage {a} -> {b}: {show(f)}" for a, b, f in stages.edges(data=True)]
    return lines


def loss_text(gm: fx.GraphModule) -> list[str]:
    """What differentiate_stages says of the model."""
    return [f"loss = {facts(gm).loss}"]


def step_text(step: Step) -> str:
    """The lines of all workers; before there are any, the order of jobs."""
    if step.lines:
        posts = (
            f"{op.task} posts {show([message.tag for message in posts])}"
            for op, posts in step.posts.items()
            if posts
        )
        return "\n".join([*lines_text(step), *posts])
    jobs = step.jobs
    every = [jobs.job(i) for i in range(len(jobs))]
    pairs = zip(jobs.keeper, jobs.worker, strict=True)
    placements = dict(zip(every, (Placement(*pair) for pair in pairs), strict=True))
    parts = [
        f"jobs = {show(list(map(jobs.job, step.order)))}",
        f"n = {show(dict(zip(every, jobs.n, strict=True)))}",
        f"placements = {show(placements)}",
        f"credits = {show(step.credits)}",
    ]
    return graph_text(step.graph, parts)


def graph_text(
    gm: fx.GraphModule, head: Sequence[str] = (), stages: bool = False
) -> str:
    """What a pass said about the graph, its nodes, and, if wanted, those of stages.

    The flat graphs inside of stages are left out: torch names their nodes, anew in
    each version.
    """
    parts = [*head, *[""][: len(head)]]
    parts += [node_text(node) for node in gm.graph.nodes]
    called = {str(n.target) for n in gm.graph.nodes if n.op == "call_module"}
    for name in sorted(called) if stages else ():
        inner = gm.get_submodule(name)
        assert isinstance(inner, fx.GraphModule)
        parts += ["", f"{name}:", *(f"  {node_text(n)}" for n in inner.graph.nodes)]
    return "\n".join(parts)


def lines_text(step: Step) -> list[str]:
    """The lines of all workers, then what each returns."""
    returned = [f"worker {w} returns {show(own)}" for w, own in step.results.items()]
    return [line_text(step, line) for line in step.lines] + returned


def line_text(step: Step, line: Op | Message) -> str:
    if isinstance(line, Message):
        encoded = f", as {', '.join(map(str, line.specs))}" * bool(line.codes)
        return f"{line}{encoded}  # task {line.task}"
    args = ", ".join(map(show, line.args))
    made = f"({args})"
    if line.target is not None:
        made = f" = {line.target.__name__}({args})"
    after = f", after {show(list(line.after))}" * bool(line.after)
    return str(line).replace("  #", f"{made}{after}  #")


def node_text(node: fx.Node) -> str:
    """`name = target(args)`, then what passes noted about it."""
    args = [show(arg) for arg in node.args]
    args += [f"{key}={show(value)}" for key, value in node.kwargs.items()]
    if node.op == "output":
        return f"return {args[0]}"
    notes = [
        f"{key} {show(node.meta[key])}"
        for key in (
            "role",
            "stage",
            "recompute",
            "passed",
            "group",
            "worker",
            "task",
            "n",
        )
        if key in node.meta
    ]
    if node.op == "placeholder":
        line = f"{node.name}: {specs_text(node)}"
    else:
        prefix = "self." if node.op in ("call_module", "get_attr") else ""
        target = prefix + name_of(node.target)
        line = f"{node.name} = {target}({', '.join(args)})"
    return f"{line}  # {', '.join(notes)}" if notes else line


def specs_text(node: fx.Node) -> str:
    specs = node.meta.get("specs")
    if specs is None and isinstance(node.meta.get("val"), torch.Tensor):
        specs = (Spec.of(node.meta["val"]),)
    return ", ".join(map(str, specs or ())) or "value"


def show(value: Any) -> str:
    """A value as Python text; jobs as 2F0, named tuples by their fields."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{show(k)}: {show(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (tuple, list)) and type(value).__str__ is object.__str__:
        fields = getattr(value, "_fields", None)
        if fields:
            inside = ", ".join(f"{f}={show(getattr(value, f))}" for f in fields)
            return f"{type(value).__name__}({inside})"
        inside = ", ".join(map(show, value))
        if isinstance(value, list):
            return f"[{inside}]"
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, Op):
        return value.name or value.task
    if isinstance(value, Role):
        return value.value
    return str(getattr(value, "__name__", value))
