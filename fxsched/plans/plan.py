"""The result of planning: programs for all workers, and predictions."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, overload

import networkx as nx
import torch
from torch import fx

from ..accounts.held import held_bytes, held_during, trained_bytes
from ..accounts.times import Times
from ..accounts.traffic import sent_between
from ..checker.check_messages import check_programs
from ..checker.check_program import examine
from ..checker.reference import Reference
from ..checker.summary import Summary
from ..clock.memory import Peaks
from ..clock.network import Transfer, Wires
from ..clock.timeline import Event, Timeline
from ..draw import plan_tables
from ..draw.diagram import Diagram
from ..draw.explanation import explain_text, stage_shares
from ..draw.memory_table import WorkerMemory
from ..draw.notebook import figure
from ..draw.plan_page import Details, StageText
from ..draw.program_table import program_table
from ..draw.shard_table import Load, ShardCosts, shard_exchange, worker_load
from ..draw.whole_stages import whole_stages
from ..ir.garbage import no_collection
from ..ir.graphs import Group, Output, State
from ..ir.parts import KeptParts, PartOf, WeightCut
from ..ir.step import Message, Op, Step
from ..jobs.compared import Compared
from ..jobs.job import Direction, Job, Placement, PlanError
from ..jobs.schedule import Schedule
from ..jobs.user_values import is_count, is_int, shown
from ..partition.measure import Known, Profile, fit_profile
from ..simulator.durations import Durations, job_seconds, set_durations
from ..simulator.simulate import Simulation, check_transfers, simulate_step
from ..simulator.timeline_comparison import compare_timelines
from .arithmetic import Arithmetic
from .replaced import replaced_text, rounded_text


class Programs(Sequence[fx.GraphModule]):
    """A program per worker, each written when it is first asked for."""

    def __init__(self, workers: int, write: Callable[[int], fx.GraphModule]) -> None:
        self._write = write
        self._written: list[fx.GraphModule | None] = [None] * workers

    def __len__(self) -> int:
        return len(self._written)

    @overload
    def __getitem__(self, worker: int) -> fx.GraphModule: ...
    @overload
    def __getitem__(self, worker: slice) -> list[fx.GraphModule]: ...
    def __getitem__(self, worker: int | slice) -> Any:
        if isinstance(worker, slice):
            return [self[i] for i in range(*worker.indices(len(self)))]
        worker = range(len(self))[worker]
        program = self._written[worker]
        if program is None:
            program = self._written[worker] = self._write(worker)
        return program


@dataclass(frozen=True)
class Plan:
    """A program for each worker, and what the programs were made from.

    stages: a networkx.DiGraph; nodes have `modules` (names), `parameters` (how many
        numbers), `flops` (of F of one microbatch); edges have `bytes` (per microbatch).
    programs: a torch.fx.GraphModule for each worker, made when you first read it.
    groups: weights and other state by group, with the workers that keep each group.
    loss: the position of the output that is the loss, if the call itself runs B; or
        None.
    step: the jobs and messages of all workers; see fxsched/ir/step.py.
    steps: a function that makes `step` with another `prefetch`.
    reference: what the programs should compute; see fxsched/checker.
    nodes: the stage and times of each of the model's operations, by names as in a
        Profile.
    draws: whether jobs draw random numbers. redraws: whether a B repeats the draws of
        an F that ran on another worker.
    half: whether gradients are computed in float16, in which small ones become 0.
    linear: whether all gradients are proportional to the gradient of the loss.
    current: whether all copies of weights are up to date when a call begins: true if
        programs step the optimizer, false if your loop does.
    by_arrival: whether updates run in order of arrival. `versions` are then those of
        the planned order, not of a run.
    inputs: the inputs of the traced graph that are not state of the model.
    arithmetic: what the model computes, to compare between ranks.
    gradient_dtype: the type in which gradients are added up; None for the parameters'
        type.
    state_bytes: bytes of the optimizer's state, by position of the parameter in the
        call; empty if not known.
    network: the network given to backend(network=), or None.
    said: text of explain() about operations in which rows meet, and about weighted
        losses.
    parts: the parts of weights that are cut into shards, by position; these positions
        follow those of the call's inputs.
    cuts: which weights are cut into shards, and why others are not.
    whole: a function that plans the same schedule without shards, from the same trace.
    compared: what the planner compared for a schedule with candidates, such as that of
        schedules.auto; see fxsched/jobs/compared.py.
    """

    schedule: Schedule
    stages: nx.DiGraph[int]
    programs: Sequence[fx.GraphModule]
    groups: tuple[Group, ...]
    outputs: tuple[Output, ...]
    loss: int | None
    step: Step
    steps: Callable[[int], Step]
    reference: Reference
    notes: tuple[str, ...] = ()
    nodes: Mapping[str, Known] = field(default_factory=dict)
    inputs: tuple[State, ...] = ()
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    draws: bool = False
    redraws: bool = False
    half: bool = False
    linear: bool = True
    current: bool = False
    by_arrival: bool = False
    gradient_dtype: torch.dtype | None = None
    state_bytes: Mapping[int, int] = field(default_factory=dict)
    network: Wires | None = None
    said: tuple[str, ...] = ()
    parts: Mapping[int, PartOf] = field(default_factory=dict)
    cuts: tuple[WeightCut, ...] = ()
    whole: Callable[[], Plan] | None = None
    compared: Compared | None = None

    @property
    def timeline(self) -> Timeline:
        """All jobs in the planned order, with starts and ends in seconds, if fetched
        weights and returned gradients took no time; `simulate` counts that time."""
        return self.step.timeline

    @property
    def lines(self) -> Sequence[Op | Message]:
        """The jobs and messages of all workers, in the global order."""
        return self.step.lines

    @cached_property
    def jobs(self) -> tuple[Job, ...]:
        """All jobs in the global order."""
        return tuple(job for job, _ in self._order)

    @cached_property
    def placements(self) -> dict[Job, Placement]:
        """The Placement of each F, B and W; for U see `updates`."""
        jobs = self.timeline.jobs
        return {
            jobs.job(i): Placement(jobs.keeper[i], jobs.worker[i], jobs.saved.get(i))
            for i in range(jobs.regular)
        }

    @property
    def updates(self) -> dict[Job, tuple[int, ...]]:
        """The workers that run each U."""
        updates: dict[Job, tuple[int, ...]] = {}
        jobs = self.timeline.jobs
        for number in jobs.updates:
            job = jobs.job(number)
            updates[job] = (*updates.get(job, ()), jobs.worker[number])
        return updates

    def weight_at(self, position: int) -> int:
        """The position of a tensor of the model, or of the one it is a part of."""
        return self.parts[position].input if position in self.parts else position

    def weight_name(self, state: State) -> str:
        """The name of a tensor of the model, or of the one it is a part of."""
        if state.input not in self.parts:
            return state.name
        return state.name.rpartition("[")[0]

    @cached_property
    def states_of_parts(self) -> dict[int, list[State]]:
        """The parts of each weight that is cut, in order, by the weight's position."""
        named = {state.input: state for group in self.groups for state in group.state}
        found: dict[int, list[State]] = {}
        for position, part in self.parts.items():
            found.setdefault(part.input, []).append(named[position])
        return found

    @cached_property
    def kept_parts(self) -> dict[int, KeptParts]:
        """How each weight is cut, and who keeps and updates its parts, by position."""
        groups = {state.input: group for group in self.groups for state in group.state}
        return {
            position: KeptParts(
                self.parts[states[0].input].cut,
                tuple(groups[state.input].owners for state in states),
                tuple(groups[state.input].updater for state in states),
            )
            for position, states in self.states_of_parts.items()
        }

    @cached_property
    def versions(self) -> dict[Job, int]:
        """How many of the call's updates the weights of each F, B and W have had."""
        jobs = self.timeline.jobs
        return {jobs.job(i): jobs.version(i) for i in range(jobs.regular)}

    @cached_property
    def memory(self) -> list[Peaks]:
        """The most bytes that each worker holds in a step, by kind.

        What operators take inside isn't counted, nor what replicas send to be averaged.
        """
        return held_bytes(self.step, self.state_bytes)

    @cached_property
    def _simulated(self) -> Simulation:
        """The step as predicted."""
        return self._ran(None, None, None)

    @property
    def _times(self) -> Times:
        """When jobs run, and when the step ends, as predicted."""
        ran = self._simulated
        return Times(ran.timeline, ran.latency, ran.find_links)

    @property
    def _memory(self) -> WorkerMemory:
        """What tables say of memory."""
        return WorkerMemory(self.memory, bool(self.updates), bool(self.state_bytes))

    @property
    def _order(self) -> Iterator[tuple[Job, int]]:
        """All jobs in the global order, with workers."""
        for line in self.lines:
            if isinstance(line, Op) and line.job is not None:
                yield line.job, line.worker

    @cached_property
    def trains(self) -> bool:
        """Whether the plan has B jobs."""
        return any(job.direction is Direction.BACKWARD for job in self.jobs)

    def __repr__(self) -> str:
        return (
            f"<Plan {plan_tables.plan_line(self.schedule, self.step)}"
            f"{', updates in order of arrival' * self.by_arrival}>"
        )

    def __str__(self) -> str:
        """A summary: the stages, and what each worker runs, sends and holds."""
        parts = self.schedule, self.stages, self.step, self._times
        return plan_tables.summary_text(*parts, self.notes, self._memory)

    def _repr_html_(self) -> str:
        picture = self.diagram().svg()
        return figure(picture, self.line, "stages and workers", str(self))

    @property
    def line(self) -> str:
        """The schedule, stages, predicted step, bubble and memory, in one line."""
        parts = self.schedule, self.stages, self._times, self._memory
        return plan_tables.load_line(*parts)

    def table(self, rank: int, jobs: int | None = None, width: int | None = 88) -> str:
        """The program of one worker, as a table with a row for each job and transfer.

        jobs: how many rows to show, from the first; all rows by default.
        width: the most columns of a line; None for no limit.
        Raises PlanError for a worker that doesn't exist, and for a count below 1.
        """
        if not is_int(rank) or not 0 <= rank < len(self.programs):
            raise PlanError(
                f"Plan.table(rank={rank!r}): give a worker, 0..{len(self.programs) - 1}"
            )
        for name, count in (("jobs", jobs), ("width", width)):
            if count is not None and not is_count(count):
                raise PlanError(
                    f"Plan.table({name}={count!r}): give an int of 1 or more, or None"
                )
        return program_table(self.programs[rank], rank, True, jobs, width)

    def text(self) -> str:
        """The whole plan: stages, owners of weights, and each worker's program table.

        Lines have any length. Equal plans have equal texts.
        """
        return plan_tables.plan_text(self._head, self.programs)

    @property
    def _head(self) -> list[str]:
        groups, notes = self.groups, self.notes
        return plan_tables.plan_head(
            self.schedule, self.stages, groups, notes, self.step.jobs
        )

    def explain(self) -> str:
        """Describes what each stage and worker costs, and what limits the step.

        For each stage: its workers, work, memory, and what one microbatch sends. For
        each worker: what it runs and holds. On a network, for each link: its bytes, and
        the share of the step in which a message is on it. With shards, a comparison
        with a plan without shards, which this method makes. Lines fit the terminal, and
        have at most 100 columns.
        """
        return explain_text(
            self.schedule,
            self.stages,
            self.timeline,
            self._times,
            self._memory,
            (*self.notes, *self.said, *self.replaced, *rounded_text(self.step)),
            self.cuts,
            self._shard_costs,
        )

    @property
    def replaced(self) -> tuple[str, ...]:
        """The values and stages that user passes replaced, as texts.

        These are the replacements that passes declare by fxsched.passes.replaces. If
        there are passes, all programs are made.
        """
        if not self.arithmetic.passes:
            return ()
        return tuple(replaced_text(self.programs, self.reference))

    @property
    def _load(self) -> Load:
        trained = None if any(self.state_bytes.values()) else trained_bytes(self.step)
        return worker_load(self.memory, trained, self._times.end)

    @property
    def _shard_costs(self) -> ShardCosts | None:
        """What the plan's shards save and cost, if there are any."""
        if self.whole is None:
            return None
        exchange = shard_exchange(self.step)
        return ShardCosts(
            self._load, self.whole()._load, exchange, bool(self.state_bytes)
        )

    def simulate(
        self,
        durations: Durations = None,
        transfer: Transfer = None,
        prefetch: int | None = None,
    ) -> Simulation:
        """Simulates the step in seconds; each worker runs its jobs in planned order.

        durations: None for the durations of the plan; a measured timeline, for the
            median of each stage and direction; or durations as for fxsched.simulate.
        transfer, prefetch: as for fxsched.simulate; None for the plan's own (transfer:
            its network, or else the estimated seconds of each message). Fetched
            weights and returned gradients take time.
        """
        check_transfers(transfer, prefetch)
        if durations is None and transfer is None and prefetch is None:
            return self._simulated
        return self._ran(durations, transfer, prefetch)

    def _ran(
        self, durations: Durations, transfer: Transfer, prefetch: int | None
    ) -> Simulation:
        stages, jobs = self.stages.copy(), self.timeline.jobs
        set_durations(stages, self.schedule, durations, frozenset(jobs.kinds))
        return simulate_step(
            self.schedule,
            stages,
            self.step if prefetch is None else self.steps(prefetch),
            job_seconds(stages, jobs, durations),
            self.network if transfer is None else transfer,
            True,
            self.state_bytes,
        )

    def diagram(self) -> Diagram:
        """A picture of the planned step.

        Its HTML page also shows the stages, memory, and bytes by link.
        """
        whole = whole_stages(self.stages)
        shares = zip(
            sorted(whole), stage_shares(self.timeline.jobs, whole), strict=True
        )
        texts = {stage: StageText(*share) for stage, share in shares}
        held = held_during(self.step, self.state_bytes)
        details = Details(whole, texts, held, sent_between(self.step))
        return replace(self._simulated.diagram("s"), details=details)

    def profile(self, *timelines: Sequence[Event]) -> Profile:
        """Makes a Profile from measured steps of this plan.

        timelines: backend.timeline of one or more steps. The times of the plan are
            scaled so that F and B of each stage take as long as in these steps, at the
            median. A new plan made with this profile balances its stages by these
            times.
        Raises PlanError for a timeline that isn't of a whole step of this plan.
        """
        for timeline in timelines or ((),):
            _check_timeline("profile", timeline)
            if Counter(event.job for event in timeline) != Counter(self.jobs):
                raise PlanError(
                    "Plan.profile: give backend.timeline of one or more whole steps of "
                    f"this plan, with each of its {len(self.jobs)} jobs once; here are "
                    f"{len(timeline)} events"
                )
        return fit_profile(self.nodes, self.stages, timelines)

    def compare(self, timeline: Sequence[Event]) -> str:
        """Shows where a measured timeline differs from the plan, as text.

        timeline: backend.timeline. The text compares the step, each worker's order,
            durations by stage and direction, and the largest waits.
        Raises PlanError if the timeline is of other jobs.
        """
        _check_timeline("compare", timeline)
        return compare_timelines(self.timeline, timeline)

    def check(self) -> None:
        """Raises CheckError unless the programs are correct; see fxsched/checker."""
        with no_collection():
            check_programs(self.programs, self.reference)

    def examine(self, rank: int) -> Summary:
        """Checks one worker's program, and summarises it for the check of all workers.

        checker.check_messages.check_summaries takes the summaries.
        """
        with no_collection():
            return examine(rank, self.programs[rank], self.reference)

    @property
    def digest(self) -> str:
        """A hash, equal for equal plans that compute the same, in any process.

        No programs are made for it.
        """
        text = hashlib.sha256(self.arithmetic.digest.encode())
        for part in (*self._head, *self.lines):
            text.update(f"{part!s}\n".encode())
        return text.hexdigest()


def _check_timeline(call: str, timeline: object) -> None:
    if not isinstance(timeline, Sequence):
        raise PlanError(
            f"Plan.{call}({shown(timeline)}): give backend.timeline, of a backend with "
            "profile=True"
        )
