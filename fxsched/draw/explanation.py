"""What explains a plan: what its stages cost, and where the time of its step goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import networkx as nx

from ..accounts.times import Times
from ..clock.arrivals import ahead_text
from ..clock.jobs import Jobs
from ..clock.joint import joint_stages, waiting_stages
from ..clock.links import LinkUse
from ..clock.stage_graph import run_stages, step_seconds
from ..clock.timeline import Timeline
from ..ir.parts import WeightCut
from ..jobs.job import whole_stage
from ..jobs.schedule import Schedule
from .cut_table import cut_table
from .memory_table import WorkerMemory, memory_tables
from .palette import clock
from .plan_tables import (
    busy_seconds,
    has_shards,
    load_rows,
    schedule_text,
    sending,
    sends_text,
    shard_cells,
    stage_text,
)
from .shard_table import ShardCosts, shard_costs_text
from .tables import (
    WIDE,
    byte_text,
    columns,
    link_table,
    module_text,
    ranges,
    shorten,
    table,
    wrapped,
)
from .whole_stages import whole_stages

FULL = 0.9  # of a step; a link that is busy for longer is named
IDLE = 0.03  # of the step, below which nothing but work limits it
MORE = "more microbatches (fxsched.recommend compares numbers for the same batch)"
APART = (
    "change what makes rows meet, unless the lines above say that the step takes longer"
)


def explain_text(
    schedule: Schedule,
    stages: nx.DiGraph[int],
    planned: Timeline,
    times: Times,
    memory: WorkerMemory,
    said: Sequence[str] = (),
    cuts: Sequence[WeightCut] = (),
    costs: ShardCosts | None = None,
) -> str:
    """The stages with their workers, work, memory and what one microbatch sends; where
    the step's time goes.

    planned: jobs, if weights and gradients are there at once; times: as predicted.
    said: the plan's notes, and of rows of the batch that meet. cuts: of weights that
    are cut into shards, and costs: what these save.
    """
    whole = whole_stages(stages)
    links = times.find_links()
    return "\n\n".join(
        (
            schedule_text(schedule, stages),
            *(wrapped(each.split("\n"), columns(WIDE)) for each in said),
            *_arrivals(schedule),
            _stage_table(planned.jobs, whole),
            *_corrections(schedule, stages),
            table(
                "worker|stages|busy|memory",
                load_rows(schedule, times, memory),
                width=columns(WIDE),
                wrap=True,
            ),
            *memory_tables(memory),
            *link_table(links, times.end),
            *cut_table(cuts),
            *(shard_costs_text(costs) if costs else ()),
            _limits(schedule, stages, planned, times, links),
        )
    )


def _stage_table(jobs: Jobs, whole: nx.DiGraph[int]) -> str:
    """A row for each stage of the model, of all its shards together."""
    rows, sent = [], sending(jobs)
    times = (whole.nodes[s][d] for s in whole for d in ("forward", "backward"))
    longest = max(times, default=0.0)
    for s, shares in zip(sorted(whole), stage_shares(jobs, whole), strict=True):
        data = whole.nodes[s]
        rows.append(
            (
                *shares,
                " + ".join(_ms(data[d], longest) for d in ("forward", "backward")),
                byte_text(data["weights"]),
                byte_text(data["held"]),
                *shard_cells(whole, s),
                sends_text(whole, s, sent),
            )
        )
    shards = "|shards" if has_shards(whole) else ""
    headers = f"stage|modules|workers|work|F + B ms|weights|held{shards}|sends"
    return table(headers, rows, width=columns(WIDE), wrap=True)


def _ms(seconds: float, longest: float) -> str:
    """In ms; 0 where it doesn't show beside the longest."""
    return f"{seconds * 1e3:.3g}" if 1e3 * seconds >= longest else "0"


def stage_shares(
    jobs: Jobs, stages: nx.DiGraph[int]
) -> Iterator[tuple[str, str, str, str]]:
    """Of each stage its number, modules, workers and share of the work, as text."""
    work = _work(stages, jobs.microbatches)
    runners: dict[int, set[int]] = {}
    for number in range(jobs.regular):
        stage, _ = jobs.kinds[jobs.kind[number]]
        runners.setdefault(whole_stage(stage), set()).add(jobs.worker[number])
    for s in sorted(stages):
        modules = module_text(stages.nodes[s]["modules"])
        share = f"{100 * work[s]:.1f} %"
        yield stage_text(stages, s), modules, ranges(sorted(runners[s])), share


def _work(stages: nx.DiGraph[int], microbatches: int) -> dict[int, float]:
    """Each stage's share of the work of a step."""
    seconds = {
        s: (data["forward"] + data["backward"])
        * (1 if data.get("joint") else microbatches)
        for s, data in stages.nodes(data=True)
    }
    whole = sum(seconds.values()) or 1.0
    return {s: each / whole for s, each in seconds.items()}


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
    yield table("stage|learning rates|B reads", rows, width=columns(WIDE), wrap=True)


def _arrivals(schedule: Schedule) -> tuple[str, ...]:
    """That order="dynamic" has updates in another order than is shown."""
    if not schedule.ahead:
        return ()
    text = (
        f"updates are of one microbatch each: under order='dynamic' "
        f"{ahead_text(schedule.ahead)}; here, and under 'static', in the planned order"
    )
    return (wrapped([text], columns(WIDE)),)


def _limits(
    schedule: Schedule,
    stages: nx.DiGraph[int],
    planned: Timeline,
    times: Times,
    links: Sequence[LinkUse],
) -> str:
    """Predicted time, bubble, the largest of what keeps workers from working, and the
    busiest link if it is busy nearly all the time."""
    near = stages.copy()
    for edge in near.edges:
        near.edges[edge]["seconds"] = 0.0
    step, paths = times.end or 1.0, min(times.end, step_seconds(planned))
    at_once = min(paths, step_seconds(run_stages(schedule, near)))
    busy = busy_seconds(schedule, planned)
    most, mean = max(busy), sum(busy) / len(busy)
    lost = {
        "unequal workers": most - mean,
        "waiting for other stages": max(at_once - most, 0.0),
        "messages of activations": paths - max(at_once, most),
    }
    if step > paths:
        lost["messages of weights and gradients"] = step - paths
    worst, time = max(lost, key=lost.__getitem__), clock(step, "s").text(step)
    those = _meeting(stages, schedule.in_order)
    advice = {
        "unequal workers": _unequal(stages, planned, busy.index(most), those),
        "waiting for other stages": _waiting(those),
        "messages of activations": "workers wait for these to arrive: cut the model "
        "where stages send fewer bytes, or allow more microbatches in flight",
        "messages of weights and gradients": "workers wait for these to arrive: use "
        "larger microbatches, or a schedule that keeps each weight on one worker",
    }
    limit = f"what limits the step: {worst}; {advice[worst]}"
    if lost[worst] < IDLE * step:
        limit = "what limits the step: work; every worker is busy nearly all the time"
    return wrapped(
        (
            f"predicted step: {time}, of which the workers are busy "
            f"{100 * mean / step:.1f} % (bubble {100 - 100 * mean / step:.1f} %)",
            "idle: "
            + ", ".join(f"{what} {100 * t / step:.1f} %" for what, t in lost.items()),
            limit,
            *_busy_link(links, step),
        ),
        columns(WIDE),
    )


def _busy_link(links: Sequence[LinkUse], step: float) -> Iterator[str]:
    use = max(links, key=lambda use: use.seconds, default=None)
    if use is not None and use.seconds > FULL * step:
        yield (
            f"the link '{use.name}' is busy {100 * use.seconds / step:.1f} % of the "
            "step: send fewer bytes on it, or use a faster network"
        )


def _meeting(stages: nx.DiGraph[int], strict: bool) -> str:
    """The global-batch stages that a B, or a stage after them, waits for: none does for
    the new value of a buffer."""
    joint = joint_stages(stages)
    late = {*waiting_stages(stages, strict).values()}
    late |= {s for s in joint if nx.descendants(stages, s) - joint}
    return shorten([stage_text(stages, s) for s in sorted(late)])


def _waiting(those: str) -> str:
    """What to do where workers wait for stages of others; those: see _meeting."""
    if not those:
        return (
            "the pipeline fills and drains in each step: try more stages a worker, or "
            f"a larger batch in {MORE}"
        )
    return (
        "the pipeline fills and drains more than once in each step, since rows of the "
        f"whole batch meet in {those}: try a larger batch in {MORE}, or {APART}"
    )


def _unequal(
    stages: nx.DiGraph[int], planned: Timeline, slowest: int, those: str
) -> str:
    """What to do about the worker that has the most to do; those: see _meeting."""
    work: dict[int, float] = {}
    for job, worker, start, end in planned:
        if worker == slowest:
            work[job.stage] = work.get(job.stage, 0.0) + end - start
    largest = max(work, key=work.__getitem__)
    if those and not stages.nodes[largest].get("joint"):
        return (
            f"worker {slowest} has the most to do; no stage has work from before and "
            f"after rows of the whole batch meet in {those}: name other stages, or "
            f"{APART}"
        )
    if not stages.nodes[largest].get("joint"):
        return (
            f"worker {slowest} has the most to do: cut finer (more stages), or place "
            "its stages elsewhere"
        )
    return (
        f"worker {slowest} runs stage {largest}* alone, since rows of the whole batch "
        "meet in it; finer cuts don't divide it: "
        f"{'give the worker no other stages, or ' * (len(work) > 1)}{APART}"
    )
