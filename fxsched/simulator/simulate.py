"""Simulates a schedule on stages, without a model: times, transfers and memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import networkx as nx
import numpy as np

from ..clock.event_loop import run_jobs
from ..clock.joint import fit_joint, out_of_order
from ..clock.links import FindLinks, LinkUse
from ..clock.memory import Peaks
from ..clock.messages import need_no_step, run_messages
from ..clock.network import Transfer, Wires, check_edges, check_transfer, delays
from ..clock.stage_graph import check_size, stage_jobs
from ..clock.timeline import Timeline
from ..clock.updates import stopped_by_order
from ..draw import tables
from ..draw.diagram import Diagram, draw
from ..draw.notebook import figure
from ..jobs.job import PlanError, whole_stage
from ..jobs.schedule import Schedule
from ..jobs.user_values import counted, is_count, is_int, too_many
from .durations import UNITS, Durations, job_seconds, set_durations
from .shards import check_sums, in_shards

if TYPE_CHECKING:  # steps need torch, which takes a second to import
    from ..accounts.workers import Worker
    from ..ir.step import Step


@dataclass(frozen=True)
class Simulation:
    """A simulated step.

    schedule: the Schedule. stages: the graph of stages.
    latency: the time from the first start to the last end, in the unit of the
        durations. If returned gradients take time, the last end may be that of a
        returned gradient.
    timeline: every job with its worker, start and end.
    make: a function that makes `step`.
    state: bytes of the optimizer's state, by position of the parameter; None for the
        bytes that the stages have.
    find_links: a function that makes `links`.
    """

    schedule: Schedule
    stages: nx.DiGraph[int]
    latency: float
    timeline: Timeline
    make: Callable[[], Step] = field(repr=False)
    state: Mapping[int, int] | None = None
    find_links: FindLinks = field(default=tuple, repr=False)

    @cached_property
    def links(self) -> tuple[LinkUse, ...]:
        """The use of each link that moves messages: its `name`, the `bytes` of these
        messages, and `busy`, the starts and ends of the times in which a message is on
        the link. Messages that take no time aren't counted.

        On a Network each host has two links, "host 0 out" and "host 0 in"; on a Link
        each pair of workers has one. Empty for any other `transfer`.
        """
        return self.find_links()

    @cached_property
    def step(self) -> Step:
        """The jobs and messages of all workers; see fxsched/ir/step.py."""
        return self.make()

    @cached_property
    def workers(self) -> tuple[Worker, ...]:
        """A record for each worker: what it runs, holds, sends and receives."""
        from ..accounts.workers import worker_records

        return worker_records(self.schedule, self.stages, self.timeline, self.step)

    @property
    def throughput(self) -> float:
        """Jobs per unit of time and worker."""
        return len(self.timeline) / (self.latency or 1.0) / self.schedule.workers

    @property
    def bubble_rate(self) -> float:
        """The share of the step in which workers are idle."""
        return self._idle(self.latency)

    @property
    def span_bubble_rate(self) -> float:
        """The share of `span` in which workers are idle, if steps follow each other."""
        return self._idle(self.span)

    def _idle(self, time: float) -> float:
        busy = float(np.subtract(self.timeline.end, self.timeline.start).sum())
        return 1.0 - busy / (time * self.schedule.workers) if time else 0.0

    @cached_property
    def span(self) -> float:
        """The longest time from a worker's first start to its last end.

        This is the time of a step if each worker begins the next step as soon as it has
        finished this one.
        """
        compute = self.timeline.jobs.columns.worker[self.timeline.order]
        first = np.full(self.schedule.workers, np.inf)
        last = np.full(self.schedule.workers, -np.inf)
        np.minimum.at(first, compute, self.timeline.start)
        np.maximum.at(last, compute, self.timeline.end)
        return float(max((last - first).max(), 0.0))

    @cached_property
    def memory(self) -> list[Peaks]:
        """The most bytes that each worker holds in a step, by kind.

        The stages must have `weights` (bytes of weights and their gradients) and
        `held`; `state`, of the optimizer, and `temporary` are optional. Weights that
        other workers keep arrive one job ahead, unless `prefetch` sets another number.
        """
        from ..accounts.held import held_bytes
        from ..accounts.paper import state_bytes

        state = state_bytes(self.step) if self.state is None else self.state
        return held_bytes(self.step, state)

    def diagram(self, unit: str = "") -> Diagram:
        """A picture of the timeline: print it, or save it as .svg, .html or .txt.

        unit: the unit of the durations, such as "s" for seconds.
        """
        release, step = self.schedule.release, (0.0, self.latency)
        workers, title = self.schedule.workers, str(self.schedule)
        drawn = draw(self.timeline, workers, title, release, unit, step)
        return replace(drawn, links=self.links)

    def table(self) -> str:
        """A line about the step, and a table of workers; equal workers share a row. On
        a Network or Link, a table of links too."""
        count = counted(len(set(map(whole_stage, self.stages))), "stage")
        line = (
            f"{self.schedule}, {count}: step {self.latency:.4g}, "
            f"bubble {100 * self.bubble_rate:.1f} %"
        )
        line = tables.wrapped([line], tables.columns(tables.WIDE))
        links = tables.link_table(self.links, self.latency)
        return "\n\n".join(
            (line, tables.worker_table(self.workers, self.latency), *links)
        )

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        table = self.table()
        line = table.partition("\n\n")[0]
        return figure(self.diagram().svg(), line, "what each worker does", table)


def simulate(
    schedule: Schedule,
    stages: int | nx.DiGraph[int] | None = None,
    durations: Durations = UNITS,
    transfer: Transfer = 0.0,
    prefetch: int | None = None,
    joint: Collection[int] = (),
    sums: int = 0,
    sum_bytes: float = 0.0,
) -> Simulation:
    """Simulates a step of a schedule.

    stages: the number of stages in a chain, or a networkx.DiGraph of stages, numbered
        from 0 in the order of data flow. By default the schedule's number of stages or,
        if that is open, one stage for each worker.
    durations: the times of F, B and (if the schedule splits the backward) W of one of
        these stages, as {"F": 1, "B": 2}; by default W takes half of B. The command
        fxsched simulate takes those of one of as many stages as workers, and divides
        them if the schedule has more stages. Or a function of the job; or a
        measured timeline, for the median of each stage and direction; or None for the
        durations of the stages, as described in fxsched/clock/stage_record.py.
    transfer: the time of a message from a job to a job on another worker; or a Link or
        Network, if the edges between stages have `bytes`; or None for the `seconds` of
        the edges.
    prefetch: the weights of how many further jobs a worker asks others for. Fetched
        weights and returned gradients then take the time `transfer`. On a Link or
        Network they take the time of half of the stage's `weights`, because `weights`
        has the bytes of weights and gradients. If transfer is None, they take the
        stage's `fetch`. prefetch=None: they take no time.
    joint: global-batch stages, in which the rows of all microbatches meet, as in a
        contrastive loss, besides those that the graph marks. Such a stage has one job
        in each direction, `3F*` and `3B*`, which takes the duration of one job.
    sums: how many sums the shards of a stage add up in F, and as many in B. The sums
        divide the stage's work into equal pieces. After each piece, each shard sends
        its part of the sum to every other shard, which takes the time `transfer`; on a
        Link or Network, the time of sum_bytes. 0: sums take no time.
    sum_bytes: the bytes of a shard's part of one sum.
    If the schedule has shards, the work of a stage is divided equally between them.
    Updates run in the planned order, even if backend(order="dynamic") would run them in
    order of arrival. Raises PlanError for arguments that can't be simulated, and if
    in_flight stops the step.
    """
    if not isinstance(schedule, Schedule):
        raise PlanError(
            f"simulate(schedule={schedule!r}): give a Schedule, such as "
            "fxsched.schedules.gpipe(workers=4, microbatches=8)"
        )
    graph = _stages(schedule, stages)
    _mark_joint(graph, joint)
    set_durations(graph, schedule, durations)
    schedule = schedule.fitted(graph)
    check_sums(schedule, sums, sum_bytes)
    if schedule.shards > 1:
        shards = in_shards(schedule, graph, durations, sums, sum_bytes)
        schedule, graph, durations = shards
    schedule = fit_joint(schedule, graph)
    return _run(schedule, graph, durations, transfer, prefetch)


def _run(
    schedule: Schedule,
    stages: nx.DiGraph[int],
    durations: Durations,
    transfer: Transfer,
    prefetch: int | None,
) -> Simulation:
    jobs = stage_jobs(schedule, stages)
    set_durations(stages, schedule, durations, frozenset(jobs.kinds))
    seconds = job_seconds(stages, jobs, durations)
    check_transfers(transfer, prefetch)
    if isinstance(transfer, Wires):
        check_edges(stages)
        transfer.check_workers(schedule.workers)
    between = {} if transfer == 0 else delays(jobs, stages, transfer)
    timeline = run_jobs(
        jobs, seconds, schedule.cap, schedule.release, between, schedule.in_order
    )
    if not timeline.complete:
        raise _stopped(schedule, timeline)

    def step() -> Step:
        from ..accounts.paper import paper_step

        ahead = 1 if prefetch is None else prefetch
        hosts = getattr(transfer, "hosts", ())  # of a Network
        return paper_step(schedule, stages, timeline, ahead, hosts=hosts)

    on_wires = isinstance(transfer, Wires)
    if prefetch is not None or (on_wires and not need_no_step(schedule, jobs, stages)):
        asked = prefetch is not None  # the jobs keep this order
        return simulate_step(schedule, stages, step(), seconds, transfer, asked)
    ran, find_links = timeline, Simulation.find_links  # which finds none
    if isinstance(transfer, Wires):
        ran, find_links = run_messages(schedule, stages, timeline, seconds, transfer)
    end = max(ran.end, default=0.0)
    return Simulation(schedule, stages, end, ran, step, find_links=find_links)


def simulate_step(
    schedule: Schedule,
    stages: nx.DiGraph[int],
    step: Step,
    seconds: Sequence[float],
    transfer: Transfer,
    parameters: bool,
    state: Mapping[int, int] | None = None,
) -> Simulation:
    """Simulates a step whose jobs have a given order; see accounts.times."""
    from ..accounts.times import step_times

    ran = step_times(step, stages, seconds, transfer, parameters)
    found = schedule, stages, ran.end, ran.timeline, lambda: step, state
    return Simulation(*found, ran.find_links)


def _mark_joint(stages: nx.DiGraph[int], joint: object) -> None:
    if isinstance(joint, str) or not isinstance(joint, Collection):
        raise PlanError(
            f"simulate(joint={joint!r}): give the numbers of stages, as {{3}}"
        )
    for s in joint:
        if not is_int(s) or s not in stages:
            raise PlanError(
                f"simulate(joint={joint!r}): {s!r} is no stage; give some of "
                f"0..{len(stages) - 1}"
            )
        stages.nodes[s]["joint"] = True


def check_transfers(transfer: object, prefetch: int | None) -> None:
    """Raises PlanError if these aren't times of messages."""
    check_transfer("simulate", transfer)
    if prefetch is not None and (not is_int(prefetch) or prefetch < 0):
        raise PlanError(
            f"simulate(prefetch={prefetch!r}): give how many jobs ahead of need "
            "weights are asked for, 0 or more; or None"
        )


def _stopped(schedule: Schedule, timeline: Timeline) -> PlanError:
    ran, jobs = set(timeline.order), timeline.jobs
    waiting = next(number for number in range(len(jobs)) if number not in ran)
    if error := stopped_by_order(schedule, jobs, waiting):
        return error
    stops, ways = [], []
    if schedule.in_flight is not None:
        stops.append("in_flight")
        ways.append("allow more microbatches in flight")
    if schedule.in_order or not stops:
        stops.append("in_order")
        ways.append(
            "give n the order of data flow"
            + ", in which updates too come before the jobs that wait for them"
            * bool(jobs.updates)
        )
    called = f" {schedule.name}" if schedule.name else ""
    return PlanError(
        f"{' or '.join(stops)} stops the schedule{called}: "
        f"{jobs.job(waiting)} never runs; {', or '.join(ways)}"
    )


def _stages(
    schedule: Schedule, stages: int | nx.DiGraph[int] | None
) -> nx.DiGraph[int]:
    """A graph of the stages that simulate may write into."""
    wanted = len(stages) if isinstance(stages, nx.DiGraph) else stages
    if (
        wanted is not None
        and not isinstance(stages, nx.DiGraph)
        and not is_count(wanted)
    ):
        raise PlanError(
            f"simulate(stages={stages!r}): give an int of 1 or more{too_many(wanted)}, "
            "or a networkx.DiGraph"
        )
    if wanted and schedule.stages not in (None, wanted):
        raise PlanError(
            f"simulate(stages=): {schedule.name or 'the schedule'} is made for "
            f"{schedule.stages} stages, not {wanted}; make it for as many"
        )
    if isinstance(stages, nx.DiGraph):
        if set(stages) != set(range(len(stages))) or not len(stages):
            raise PlanError(
                f"simulate(stages=): its nodes are {list(stages)[:5]}; number the "
                "stages from 0"
            )
        if wrong := out_of_order(stages):
            maker, reader = wrong
            raise PlanError(
                f"simulate(stages=): stage {reader} reads stage {maker}, which has no "
                "smaller number; number the stages in the order of data flow"
            )
        return stages.copy()
    count = (schedule.stages or schedule.workers) if stages is None else stages
    check_size(schedule, count)  # before there is a graph of them
    chain: nx.DiGraph[int] = nx.path_graph(count, nx.DiGraph)
    return chain
