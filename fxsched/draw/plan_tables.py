"""What a plan says of itself: its stages, its workers, and what limits its step."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

import networkx as nx
from torch import fx

from ..clock.arrivals import ahead_text
from ..clock.stage_graph import run_stages, step_seconds, worker_bytes
from ..clock.timeline import Timeline
from ..ir import ops
from ..ir.graphs import Group, Specs
from ..ir.step_ir import TOKEN, Credit, Line, Message, Running, Value, values_in
from ..jobs.job import Job
from ..jobs.schedule import Schedule
from .memory_table import WorkerMemory, memory_tables
from .palette import clock
from .program_table import program_table
from .tables import WIDTH, byte_text, first_rows, ranges, shorten, table

EXPLAINED = 100  # columns of what explains a plan


def plan_head(
    schedule: Schedule,
    stages: nx.DiGraph[int],
    groups: Sequence[Group],
    notes: Iterable[str],
) -> list[str]:
    """A plan but for its programs: a line, notes, the stages and the weights."""
    rows = [
        (i, shorten(group.names), _list(group.owners), _list(group.stages))
        for i, group in enumerate(groups)
    ]
    return [
        f"{schedule}, {len(stages)} stages",
        *notes,
        table(STAGES, _stage_rows(stages)),
        table("weights|tensors|kept by|read by stages", rows),
    ]


def plan_text(head: Sequence[str], programs: Sequence[fx.GraphModule]) -> str:
    """What plan_head gives, how many messages there are, and all workers' tables."""
    messages = sum(node.target is ops.send for p in programs for node in p.graph.nodes)
    tables = [program_table(program, rank) for rank, program in enumerate(programs)]
    summary = f"{head[0]}, {messages} transfers a step"
    return "\n\n".join((summary, *head[1:], *tables))


def plan_line(
    schedule: Schedule, timeline: Timeline, lines: Sequence[Line | Message]
) -> str:
    """A plan in a line."""
    stages = len({stage for stage, _ in timeline.jobs.kinds})
    sent = byte_text(sum(_sent(schedule.workers, lines)))
    return f"{schedule}, {stages} stages, {len(timeline)} jobs, {sent} sent"


def summary_text(
    schedule: Schedule,
    stages: nx.DiGraph[int],
    timeline: Timeline,
    lines: Sequence[Line | Message],
    notes: Iterable[str],
    memory: WorkerMemory | None = None,
) -> str:
    """The stages, and what each worker does, sends and holds, in lines of 88 columns.

    lines: of the step; its messages say how many bytes each worker sends.
    """
    step = step_seconds(timeline)
    time, busy = clock(step, "s"), _busy(schedule, timeline)
    bubble = 1 - sum(busy) / len(busy) / (step or 1.0)
    sent = _sent(schedule.workers, lines)
    messages = sum(isinstance(line, Message) for line in lines)
    loads = zip(_loads(schedule, stages, timeline, memory), sent, strict=True)
    rows = [(*load[:-1], byte_text(size), load[-1]) for load, size in loads]
    return "\n\n".join(
        (
            f"{schedule}, {len(stages)} stages",
            *(_wrapped([note]) for note in notes),
            f"predicted step: {time.text(step)}, bubble {100 * bubble:.1f} %; "
            f"{messages} transfers, {byte_text(sum(sent))}",
            first_rows(STAGES, _stage_rows(stages)),
            first_rows("worker|stages|busy|sends|memory", rows),
            *memory_tables(memory),
        )
    )


STAGES = "stage|modules|parameters|FLOPs|sends per microbatch"


def _stage_rows(stages: nx.DiGraph[int]) -> list[tuple[object, ...]]:
    """The stages: modules, share of FLOPs, parameters, and bytes to each reader."""
    flops = {s: stages.nodes[s]["flops"] for s in stages}
    whole = sum(flops.values()) or 1
    return [
        (
            s,
            shorten(stages.nodes[s]["modules"]),
            f"{stages.nodes[s]['parameters']:,}",
            f"{100 * flops[s] / whole:.1f} %",
            _sends(stages, s),
        )
        for s in sorted(stages)
    ]


def _sends(stages: nx.DiGraph[int], stage: int) -> str:
    return ", ".join(
        f"{to}: {byte_text(data['bytes'])}"
        for _, to, data in stages.edges(stage, data=True)
    )


def _sent(workers: int, lines: Sequence[Line | Message]) -> list[int]:
    """How many bytes each worker sends in a step."""
    sums: dict[Value, Specs] = {  # what is added up has the shapes of the sum
        value: line.specs
        for line in lines
        if isinstance(line, Line)
        for value in values_in(line.args)
        if isinstance(value, Running)
    }

    def specs(value: Value) -> Specs:
        if isinstance(value, Credit):
            return (TOKEN,)
        if isinstance(value, Line):
            return value.specs
        if isinstance(value, Running):
            return sums[value]
        node = value if isinstance(value, fx.Node) else value.node
        shapes: Specs = node.meta["specs"]
        return shapes

    sent = [0] * workers
    for line in lines:
        if isinstance(line, Message):
            sent[line.source] += sum(spec.bytes for spec in specs(line.value))
    return sent


def explain_text(
    schedule: Schedule, stages: nx.DiGraph[int], memory: WorkerMemory | None = None
) -> str:
    """The stages with their workers, work, memory and what one microbatch sends; where
    the step's time goes."""
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
                shorten(data["modules"]),
                ranges(sorted(workers)),
                f"{100 * (data['forward'] + data['backward']) / whole:.1f} %",
                f"{data['forward'] * 1e3:.3g} + {data['backward'] * 1e3:.3g}",
                byte_text(data["weights"]),
                byte_text(data["held"]),
                _sends(stages, s),
            )
        )
    headers = "stage|modules|workers|work|F + B ms|weights|held|sends"
    events = run_stages(schedule, stages)
    return "\n\n".join(
        (
            f"{schedule}, {len(stages)} stages",
            *_arrivals(schedule),
            table(headers, rows, width=EXPLAINED),
            *_corrections(schedule, stages),
            table(
                "worker|stages|busy|memory", _loads(schedule, stages, events, memory)
            ),
            *memory_tables(memory),
            _limits(schedule, stages, events),
        )
    )


def _corrections(schedule: Schedule, stages: nx.DiGraph[int]) -> Iterator[str]:
    """What rate and drift do to each stage, if the schedule has them."""
    if schedule.rate is None and schedule.drift is None:
        return
    rows = []
    for s in sorted(stages):
        rate, drift = schedule.stage_rate(s), schedule.stage_drift(s)
        rates, reads = "lr", "weights"
        if rate is not None and rate.delay != 1:
            rates = f"lr / {rate.delay:g} at first, lr from update {rate.annealed} on"
        if drift is not None:
            reads = f"weights - {drift.gap:g} velocity, decay {drift.decay:.4g}"
        rows.append((s, rates, reads))
    yield table("stage|learning rates|B reads", rows, width=EXPLAINED)


def _arrivals(schedule: Schedule) -> tuple[str, ...]:
    """That order="dynamic" has updates in another order than is shown."""
    if not schedule.ahead:
        return ()
    text = (
        f"updates are of one microbatch each: under order='dynamic' "
        f"{ahead_text(schedule.ahead)}; here, and under 'static', in the planned order"
    )
    return (textwrap.fill(text, EXPLAINED),)


def _loads(
    schedule: Schedule,
    stages: nx.DiGraph[int],
    timeline: Timeline,
    memory: WorkerMemory | None,
) -> list[tuple[object, ...]]:
    """What each worker runs, how busy it is, and what it holds."""
    step = step_seconds(timeline) or 1.0
    busy = _busy(schedule, timeline)
    if memory is None:
        held = worker_bytes(schedule, stages, timeline)
    else:
        held = [peak.at_once.total for peak in memory.peaks]
    run: list[set[int]] = [set() for _ in range(schedule.workers)]
    for event in timeline:
        run[event.worker].add(event.job.stage)
    return [
        (
            w,
            shorten([str(s) for s in sorted(run[w])]),
            f"{100 * busy[w] / step:.1f} %",
            byte_text(held[w]),
        )
        for w in range(schedule.workers)
    ]


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
    return _wrapped(
        (
            f"predicted step: {step * 1e3:.3g} ms, of which the workers are busy "
            f"{100 * mean / step:.1f} % (bubble {100 - 100 * mean / step:.1f} %)",
            "idle: "
            + ", ".join(f"{what} {100 * t / step:.1f} %" for what, t in lost.items()),
            limit,
        ),
        EXPLAINED,
    )


def _wrapped(lines: Iterable[str], width: int = WIDTH) -> str:
    return "\n".join(part for line in lines for part in textwrap.wrap(line, width))


def _list(numbers: Sequence[int]) -> str:
    return "+".join(map(str, numbers))
