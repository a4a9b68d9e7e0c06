"""What is legal: facts that passes may leave on nodes, and a verifier of programs.

The verifier reads nothing but finished programs and the schedule's placements. It
proves that running them cannot deadlock, read what isn't there, or lose a gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import networkx as nx
from torch import fx

from . import ops
from .graphs import Group, Spec, arguments, result
from .jobs import Direction, Job, Placement

# The keys of node.meta, and what they say. Passes use no others.
META = {
    "val": "fake value of a node of the traced graph",
    "role": "Role of an input of the traced graph",
    "name": "the user's name of an input",
    "index": "position of an input in the call",
    "input": "position of a batch input in the call",
    "tangent": "the output whose gradient this placeholder is",
    "module": "module that a node was called in",
    "work": "Work of a node of the traced graph",
    "key": "name that a node keeps in other traces of the model",
    "measured": "seconds of F and B of a stage's nodes, if a profile gave them",
    "seconds": "estimated or measured seconds of a stage's call",
    "mutates": "fake tensors that a node writes into",
    "stack_trace": "the user's line",
    "stage": "stage of a node",
    "direction": "Direction of a stage's call",
    "group": "number of a group of weights, or of the sum of its gradients",
    "random": "how many draws of random numbers a node makes",
    "draws": "numbers of a stage's draws in the model, from its first",
    "draw": "number of a stage's first draw in the model; None if it makes none",
    "specs": "shapes of the tensors in a value",
    "bundle": "whether a value is a tuple of tensors",
    "worker": "worker that runs a node",
    "task": "job or other piece of work that a node belongs to",
    "n": "priority of that task",
    "job": "job that a call is",
}

# The keys of gm.meta that passes hand on, and what they say.
GRAPH_META = {
    "outputs": "Output for each output of the model",
    "fake_mode": "the mode that fake values live in",
    "measured": "whether a profile gave the nodes their work",
    "schedule": "Schedule for these stages",
    "shared": "nodes that every stage computes for itself",
    "stage_count": "number of stages",
    "stages": "the stages as a networkx.DiGraph",
    "groups": "Group for each group of weights",
    "state": "State of each parameter, buffer and shared input, by name",
    "loss": "position of the output that B starts from in the call, or None",
    "jobs": "all jobs in the global order",
    "placements": "w of each job",
    "n": "n of each job",
    "timeline": "Timeline of when each job should run",
    "credits": "the B, or W, that each capped F waits for",
    "layout": "Layout: what jobs' lines stand for",
    "lines": "the step: a Line for each job, then for all else, and Messages",
    "running": "the last job on a worker that adds to a group's Running",
    "pauses": "pause line of each worker, if B runs in backward()",
    "results": "what each worker returns, in values of lines",
    "tags": "number of messages so far",
}

RECEIVES = (ops.recv, ops.fetch)


class CheckError(AssertionError):
    """A program that must not run: a fault in a pass, fxsched's own or the user's."""


def check_programs(
    programs: Sequence[fx.GraphModule],
    placements: Mapping[Job, Placement],
    groups: Sequence[Group],
) -> None:
    """Raises CheckError unless the programs are sound.

    Sound: every job runs once, where w says; every recv has its send, of the same
    shapes, and the other way round; each pair of workers sends and receives in one
    order; with each send and its recv as one event, the programs' orders have no
    circle, and neither do tasks; a job calls its own stage, and reads values of its own
    microbatch and what its own F saved or B carries; every value is there when it is
    read, and freed once; the gradient of every parameter holds every B (or W) of every
    microbatch once, and reaches all its owners.
    """
    _check_jobs(programs, placements)
    messages = _match(programs)
    _check_order(programs, messages)
    _check_cycle(programs, messages)
    _check_microbatches(programs, messages)
    _check_sources(programs, messages)
    _check_tasks(programs, messages)
    for rank, program in enumerate(programs):
        _check_lives(rank, program)
    _check_gradients(programs, messages, placements, groups)


class Message(NamedTuple):
    """A send and its recv."""

    source: int
    to: int
    send: fx.Node
    recv: fx.Node


def _check_jobs(
    programs: Sequence[fx.GraphModule], placements: Mapping[Job, Placement]
) -> None:
    ran: Counter[Job] = Counter()
    for rank, program in enumerate(programs):
        for node in program.graph.nodes:
            if node.op == "call_module":
                job = node.meta["job"]
                ran[job] += 1
                if placements[job].compute != rank:
                    raise CheckError(
                        f"{job} runs on worker {rank}, but w puts it on "
                        f"{placements[job].compute}"
                    )
    for job in placements:
        if ran[job] != 1:
            raise CheckError(f"{job} runs {ran[job]} times")


def _match(programs: Sequence[fx.GraphModule]) -> dict[int, Message]:
    """Messages by tag; raises if a send or a recv is alone or they disagree."""
    sends: dict[int, tuple[int, fx.Node]] = {}
    recvs: dict[int, tuple[int, fx.Node]] = {}
    for rank, program in enumerate(programs):
        for node in program.graph.nodes:
            if node.target is ops.send or node.target in RECEIVES:
                side = sends if node.target is ops.send else recvs
                tag = node.kwargs["tag"]
                if tag in side:
                    raise CheckError(f"tag {tag} is used twice: {_where(rank, node)}")
                side[tag] = (rank, node)
    messages = {}
    for tag, (rank, recv) in recvs.items():
        if tag not in sends:
            raise CheckError(f"{_where(rank, recv)} has no send")
        source, send = sends[tag]
        if recv.kwargs["source"] != source or send.kwargs["to"] != rank:
            raise CheckError(
                f"{_where(source, send)} and {_where(rank, recv)} name other workers"
            )
        value = send.args[0]
        assert isinstance(value, fx.Node)
        if _shapes(value) != _shapes(recv):
            raise CheckError(
                f"{_where(source, send)} sends {_text(value)}, but "
                f"{_where(rank, recv)} expects {_text(recv)}"
            )
        messages[tag] = Message(source, rank, send, recv)
    for tag, (rank, send) in sends.items():
        if tag not in recvs:
            raise CheckError(f"{_where(rank, send)} has no recv")
    return messages


def _shapes(node: fx.Node) -> list[tuple[Any, ...]]:
    return [(spec.shape, spec.dtype) for spec in node.meta["specs"]]


def _text(node: fx.Node) -> str:
    specs: Sequence[Spec] = node.meta["specs"]
    return ", ".join(map(str, specs)) or "nothing"


def _check_order(
    programs: Sequence[fx.GraphModule], messages: Mapping[int, Message]
) -> None:
    sent: dict[tuple[int, int], list[int]] = {}
    received: dict[tuple[int, int], list[int]] = {}
    for rank, program in enumerate(programs):
        for node in program.graph.nodes:
            if node.target is ops.send:
                tag = node.kwargs["tag"]
                sent.setdefault((rank, messages[tag].to), []).append(tag)
            elif node.target in RECEIVES:
                tag = node.kwargs["tag"]
                received.setdefault((messages[tag].source, rank), []).append(tag)
    for pair, tags in sent.items():
        for mine, other in zip(tags, received[pair], strict=True):
            if mine != other:
                raise CheckError(
                    f"worker {pair[0]} sends tag {mine} to worker {pair[1]} where that "
                    f"receives tag {other}; sends and recvs of a pair must be in one "
                    "order"
                )


def _check_cycle(
    programs: Sequence[fx.GraphModule], messages: Mapping[int, Message]
) -> None:
    """Each send-recv pair is one event of both programs: no circle in the orders."""
    flow: nx.DiGraph[Any] = nx.DiGraph()
    for rank, program in enumerate(programs):
        before: Any = None
        for position, node in enumerate(program.graph.nodes):
            if node.op in ("placeholder", "output"):
                continue
            tag = (
                node.kwargs.get("tag") if node.target in (ops.send, *RECEIVES) else None
            )
            event = (rank, position) if tag is None else ("tag", tag)
            if before is not None:
                flow.add_edge(before, event)
            before = event
    if nx.is_directed_acyclic_graph(flow):
        return
    tags = [a[1] for a, _ in nx.find_cycle(flow) if a[0] == "tag"]
    steps = [
        f"  {_where(messages[t].source, messages[t].send)} with "
        f"{_where(messages[t].to, messages[t].recv)}"
        for t in tags
    ]
    raise CheckError(
        "the programs wait for each other in a circle:\n" + "\n".join(steps)
    )


def _check_tasks(
    programs: Sequence[fx.GraphModule], messages: Mapping[int, Message]
) -> None:
    """The same for whole tasks, because one starts once all that it reads is there."""
    flow: nx.DiGraph[tuple[int, str]] = nx.DiGraph()
    for rank, program in enumerate(programs):
        order = dict.fromkeys(
            (rank, node.meta["task"])
            for node in program.graph.nodes
            if node.op.startswith("call") and node.target not in RECEIVES
        )
        nx.add_path(flow, order)
        for node in program.graph.nodes:
            if (
                not node.op.startswith("call")
                or node.target in RECEIVES
                or node.target is ops.free
            ):
                continue
            task = (rank, node.meta["task"])
            for value in node.all_input_nodes:
                if value.target in RECEIVES:
                    message = messages[value.kwargs["tag"]]
                    flow.add_edge((message.source, message.send.meta["task"]), task)
                elif value.op != "placeholder" and value.meta["task"] != task[1]:
                    flow.add_edge((rank, value.meta["task"]), task)
    if not nx.is_directed_acyclic_graph(flow):
        circle = [f"{task} on worker {rank}" for (rank, task), _ in nx.find_cycle(flow)]
        raise CheckError("tasks wait for each other in a circle: " + ", ".join(circle))


def _check_microbatches(
    programs: Sequence[fx.GraphModule], messages: Mapping[int, Message]
) -> None:
    """A job reads values of its own microbatch, besides weights."""
    for rank, program in enumerate(programs):
        for node in program.graph.nodes:
            if node.op == "call_module":
                own = node.meta["job"].microbatch
                read: list[fx.Node] = []
                fx.map_arg(node.args[1:], read.append)
                for value in read:
                    others = _microbatches(value, messages) - {own}
                    if others:
                        raise CheckError(
                            f"worker {rank}: {node.meta['job']} reads {value}, which "
                            f"is of microbatch {min(others)}"
                        )


def _check_sources(
    programs: Sequence[fx.GraphModule], messages: Mapping[int, Message]
) -> None:
    """A job calls its own stage; B reads what its F saved, and W what its B carries."""
    names = {
        Direction.FORWARD: "forward",
        Direction.BACKWARD: "backward",
        Direction.WEIGHT: "weight",
    }
    before = {
        Direction.BACKWARD: Direction.FORWARD,
        Direction.WEIGHT: Direction.BACKWARD,
    }
    for rank, program in enumerate(programs):
        for node in program.graph.find_nodes(op="call_module"):
            job: Job = node.meta["job"]
            if node.target != f"{names[job.direction]}_{job.stage}":
                raise CheckError(f"worker {rank}: {job} calls {node.target}")
            kept = node.args[1]
            if job.direction in before and isinstance(kept, fx.Node):
                maker = _maker(kept, messages)
                wanted = job._replace(direction=before[job.direction])
                if maker != wanted:
                    raise CheckError(
                        f"worker {rank}: {job} reads {kept}, which {maker} made, "
                        f"not {wanted}"
                    )


def _maker(value: fx.Node, messages: Mapping[int, Message]) -> Job | None:
    """The job that a part of its result comes from."""
    while value.target in RECEIVES:
        tag: Any = value.kwargs["tag"]
        value = arguments(messages[tag].send)[0]
    source = value.args[0] if value.args else None
    if isinstance(source, fx.Node) and source.op == "call_module":
        job: Job = source.meta["job"]
        return job
    return None


def _microbatches(value: fx.Node, messages: Mapping[int, Message]) -> set[int]:
    """The microbatches that a value was made from."""
    found: set[int] = set()
    open_ends = [value]
    while open_ends:
        node = open_ends.pop()
        if node.op == "call_module":
            found.add(node.meta["job"].microbatch)
        elif node.target is ops.rows:
            found.add(arguments(node)[1])
        elif node.target in RECEIVES:
            tag: Any = node.kwargs["tag"]
            open_ends.append(arguments(messages[tag].send)[0])
        elif node.target is not ops.pause:
            open_ends += node.all_input_nodes
    return found


def _check_lives(rank: int, program: fx.GraphModule) -> None:
    made: set[fx.Node] = set()
    freed: set[fx.Node] = set()
    output = program.graph.output_node()
    for node in program.graph.nodes:
        for value in node.all_input_nodes:
            if value not in made:
                raise CheckError(
                    f"{_where(rank, node)} reads {value} before it is made"
                )
            if value in freed:
                verb = "frees" if node.target is ops.free else "reads"
                raise CheckError(f"{_where(rank, node)} {verb} {value} after its free")
        if node.target is ops.free:
            freed.update(node.all_input_nodes)
        made.add(node)
    kept = set(output.all_input_nodes)
    for node in made - freed - kept:
        if node.op.startswith("call") and node.target not in ops.VALUELESS:
            raise CheckError(f"worker {rank} never frees {node}")


def _check_gradients(
    programs: Sequence[fx.GraphModule],
    messages: Mapping[int, Message],
    placements: Mapping[Job, Placement],
    groups: Sequence[Group],
) -> None:
    """Follows each gradient that a worker returns back to the B, or W, jobs that made
    it."""
    split = any(job.direction is Direction.WEIGHT for job in placements)
    gives = Direction.WEIGHT if split else Direction.BACKWARD
    expected: dict[int, Counter[Job]] = {}
    for program in programs:
        for node in program.graph.nodes:
            group = node.meta.get("group")
            source = node.args[0] if node.args else None
            if (
                group is not None
                and isinstance(source, fx.Node)
                and source.op == "call_module"
                and source.meta["job"].direction is gives
            ):
                expected.setdefault(group, Counter())[source.meta["job"]] += 1
    for number, group in enumerate(groups):
        made = expected.get(number, Counter())
        for job in placements:
            if job.direction is gives and job.stage in group.givers and not made[job]:
                names = ", ".join(group.names[:3])
                raise CheckError(f"{job} gives no gradient of group {number}: {names}")
    trains = any(job.direction is Direction.BACKWARD for job in placements)
    for group in range(len(groups)):
        jobs = expected.get(group, Counter())
        if not trains or not any(groups[group].trained):
            continue
        for rank in groups[group].owners:
            node = result(programs[rank])["groups"].get(str(group))
            if node is None:
                raise CheckError(
                    f"worker {rank} keeps {', '.join(groups[group].names[:3])} but "
                    "gets no gradient of it"
                )
            found = _contributions(node, messages)
            if found != jobs:
                wrong = sorted((jobs - found) + (found - jobs))
                raise CheckError(
                    f"worker {rank} gets a gradient of group {group} in which "
                    f"{', '.join(map(str, wrong))} is missing or counted twice"
                )


def _contributions(node: fx.Node, messages: Mapping[int, Message]) -> Counter[Job]:
    """The jobs whose gradients a value adds up."""
    found: Counter[Job] = Counter()
    open_ends = [node]
    while open_ends:
        node = open_ends.pop()
        if node.target in RECEIVES:
            tag: Any = node.kwargs["tag"]
            open_ends.append(arguments(messages[tag].send)[0])
        elif node.target in (ops.accumulate, ops.reduce):
            open_ends += [a for a in node.args if isinstance(a, fx.Node)]
        else:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            found[source.meta["job"]] += 1
    return found


def _where(rank: int, node: fx.Node) -> str:
    name = getattr(node.target, "__name__", str(node.target))
    if "tag" in node.kwargs:
        name = f"{name}(tag={node.kwargs['tag']})"
    return f"worker {rank}: {name} of {node.meta.get('task', node.name)}"
