"""What a plan says of itself: its stages, its workers, and what limits its step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

import networkx as nx
from torch import fx

from ..accounts.times import Times
from ..accounts.traffic import traffic
from ..clock.jobs import Jobs
from ..clock.timeline import Event
from ..ir import ops
from ..ir.graphs import Group
from ..ir.step import Message, Step
from ..jobs.job import whole_stage
from ..jobs.schedule import Schedule
from ..jobs.user_values import counted
from .memory_table import WorkerMemory, memory_tables
from .palette import clock
from .program_table import program_table
from .tables import (
    byte_text,
    first_rows,
    module_text,
    ranges,
    shorten,
    table,
    wrapped,
)
from .whole_stages import shard_text, whole_stages

READERS = 64  # characters of a list of readers
IDLE = 0.3  # of a step; from there on a plan's line says where to read why


def plan_head(
    schedule: Schedule,
    stages: nx.DiGraph[int],
    groups: Sequence[Group],
    notes: Iterable[str],
    jobs: Jobs,
) -> list[str]:
    """A plan but for its programs: a line, notes, the stages and the weights."""
    named = {int(stage): shard_text(stage) for stage in stages}
    rows = [
        (
            i,
            shorten(group.names),
            _list(group.owners),
            _list(list(dict.fromkeys(named[s] for s in group.stages))),
        )
        for i, group in enumerate(groups)
    ]
    return [
        schedule_text(schedule, stages),
        *notes,
        table(*_stage_table(whole_stages(stages), jobs, None)),
        table("weights|tensors|kept by|read by stages", rows),
    ]


def plan_text(head: Sequence[str], programs: Sequence[fx.GraphModule]) -> str:
    """What plan_head gives, how many messages there are, and all workers' tables."""
    messages = sum(node.target is ops.send for p in programs for node in p.graph.nodes)
    tables = [program_table(program, rank) for rank, program in enumerate(programs)]
    summary = f"{head[0]}, {counted(messages, 'message')} a step"
    return "\n\n".join((summary, *head[1:], *tables))


def plan_line(schedule: Schedule, step: Step) -> str:
    """A plan in a line."""
    count = len({getattr(s, "stage", s) for s, _ in step.jobs.kinds})
    stages, jobs = counted(count, "stage"), len(step.timeline)
    sent = byte_text(sum(each.sent for each in traffic(step)))
    return f"{schedule}, {stages}, {jobs} jobs, {sent} sent"


def summary_text(
    schedule: Schedule,
    stages: nx.DiGraph[int],
    step: Step,
    times: Times,
    notes: Iterable[str],
    memory: WorkerMemory,
) -> str:
    """The stages; what each worker does, sends and holds; in lines of at most 88."""
    whole = whole_stages(stages)
    sent = [each.sent for each in traffic(step)]
    messages = sum(
        isinstance(line, Message) and (line.bytes > 0 or not line.among)
        for line in step.lines
    )
    loads = zip(load_rows(schedule, times, memory), sent, strict=True)
    rows = [(*load[:-1], byte_text(size), load[-1]) for load, size in loads]
    return "\n\n".join(
        (
            schedule_text(schedule, stages),
            *(wrapped([note]) for note in notes),
            f"{step_text(schedule, times)}; "
            f"{counted(messages, 'message')}, {byte_text(sum(sent))}",
            first_rows(*_stage_table(whole, step.jobs)),
            first_rows("worker|stages|busy|sends|memory", rows),
            *memory_tables(memory),
        )
    )


def _stage_table(
    stages: nx.DiGraph[int], jobs: Jobs, limit: int | None = READERS
) -> tuple[str, list[tuple[object, ...]]]:
    """Headers, and the stages: modules, share of FLOPs, parameters, and bytes of a
    microbatch to other shards and to each reader."""
    flops = {
        s: data["flops"] * (1 if data.get("joint") else jobs.microbatches)
        for s, data in stages.nodes(data=True)
    }
    whole = sum(flops.values()) or 1
    shards, sent = "|shards" if has_shards(stages) else "", sending(jobs)
    return f"stage|modules|parameters|FLOPs{shards}|sends per microbatch", [
        (
            stage_text(stages, s),
            module_text(stages.nodes[s]["modules"]),
            f"{stages.nodes[s]['parameters']:,}",
            f"{100 * flops[s] / whole:.1f} %",
            *shard_cells(stages, s),
            sends_text(stages, s, sent, limit),
        )
        for s in sorted(stages)
    ]


def sending(jobs: Jobs) -> Set[tuple[int, int]]:
    """Each pair of stages that reads results of one another on another worker."""
    worker, found = jobs.columns.worker, set[tuple[int, int]]()
    for reader, makers in enumerate(jobs.preds):
        for maker in makers:
            here, there = jobs.grid[:, maker], jobs.grid[:, reader]
            if (worker[here] != worker[there]).any():
                a, b = (whole_stage(jobs.kinds[k][0]) for k in (maker, reader))
                found |= {(a, b), (b, a)}
    return found


def sends_text(
    stages: nx.DiGraph[int],
    stage: int,
    sent: Set[tuple[int, int]],
    limit: int | None = READERS,
) -> str:
    """Bytes to each stage that reads one on another worker, or to all of them together
    in a text of more than `limit` characters; sent: see `sending`."""
    sizes = {
        to: data["bytes"]
        for _, to, data in stages.edges(stage, data=True)
        if to != stage and (stage, to) in sent
    }
    text = ", ".join(f"{to}: {byte_text(size)}" for to, size in sizes.items())
    if limit is None or len(text) <= limit:
        return text
    return f"{ranges(sorted(sizes))}: {byte_text(sum(sizes.values()))} in all"


def has_shards(stages: nx.DiGraph[int]) -> bool:
    """Whether stages of the model are of several pieces."""
    return any("pieces" in data for _, data in stages.nodes(data=True))


def shard_cells(stages: nx.DiGraph[int], stage: int) -> tuple[str, ...]:
    """Bytes that a stage's shards send each other, where there are shards."""
    if not has_shards(stages):
        return ()
    return (byte_text(stages.get_edge_data(stage, stage, {"bytes": 0})["bytes"]),)


def stage_text(stages: nx.DiGraph[int], stage: int) -> str:
    """A stage's number, as its jobs print: 2, or 2* if it is joint."""
    return f"{stage}{'*' * bool(stages.nodes[stage].get('joint'))}"


def load_rows(
    schedule: Schedule, times: Times, memory: WorkerMemory
) -> list[tuple[object, ...]]:
    """What each worker runs, how busy it is, and what it holds."""
    timeline, step = times.timeline, times.end or 1.0
    busy = busy_seconds(schedule, timeline)
    held = _held(memory)
    run: list[set[int]] = [set() for _ in range(schedule.workers)]
    for event in timeline:
        run[event.worker].add(event.job.stage)
    return [
        (
            w,
            shorten(list(dict.fromkeys(map(shard_text, sorted(run[w]))))),
            f"{100 * busy[w] / step:.1f} %",
            byte_text(held[w]),
        )
        for w in range(schedule.workers)
    ]


def _held(memory: WorkerMemory) -> list[float]:
    """The most bytes that each worker holds."""
    return [peak.at_once.total for peak in memory.peaks]


def load_line(
    schedule: Schedule,
    stages: nx.DiGraph[int],
    times: Times,
    memory: WorkerMemory,
) -> str:
    """What a plan's step should take, in a line, and where to read why workers are
    idle for much of it."""
    most = byte_text(max(_held(memory)))
    parts = [
        schedule_text(schedule, stages),
        f"{step_text(schedule, times)}, at most {most} a worker",
    ]
    if _bubble(schedule, times) > IDLE:
        whole = whole_stages(stages)
        joint = sorted(s for s, joint in whole.nodes(data="joint") if joint)
        meet = [stage_text(whole, s) for s in joint]
        where = f"stage{'s' * (len(meet) > 1)} {shorten(meet)}"
        parts += [f"rows of the whole batch meet in {where}"] * bool(meet)
        parts.append("plan.explain() says why workers are idle")
    return "; ".join(parts)


def schedule_text(schedule: Schedule, stages: nx.DiGraph[int]) -> str:
    """A schedule, and how many stages of the model it is for."""
    return f"{schedule}, {counted(len(whole_stages(stages)), 'stage')}"


def step_text(schedule: Schedule, times: Times) -> str:
    """How long a plan's step should take, and the share of it that workers are idle."""
    time = clock(times.end, "s").text(times.end)
    return f"predicted step: {time}, bubble {100 * _bubble(schedule, times):.1f} %"


def _bubble(schedule: Schedule, times: Times) -> float:
    """The share of a plan's step that workers are idle."""
    busy = busy_seconds(schedule, times.timeline)
    return 1 - sum(busy) / len(busy) / (times.end or 1.0)


def busy_seconds(schedule: Schedule, events: Sequence[Event]) -> list[float]:
    """How long each worker runs jobs."""
    busy = [0.0] * schedule.workers
    for event in events:
        busy[event.worker] += event.end - event.start
    return busy


def _list(numbers: Sequence[object]) -> str:
    return "+".join(map(str, numbers))
