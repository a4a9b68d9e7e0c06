"""What a schedule made for microbatches comes to where some stages are joint.

The rows of all microbatches meet in a global-batch stage: it has one job a direction.
Its F waits for F of all microbatches of what it reads, so B of these stages waits for
all of their own F: caps below that cannot be kept, and no order may ask for B before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import networkx as nx

from ..jobs.answers import Place, Priority
from ..jobs.job import Direction, Placement, PlanError
from ..jobs.own_caps import CapsOfKnown, OwnCaps
from ..jobs.schedule import Schedule
from .activations import holding
from .jobs import Jobs

FORWARD, BACKWARD, *_ = Direction


def joint_stages(stages: nx.DiGraph[int]) -> frozenset[int]:
    """The stages that run once, on all rows of the batch."""
    return frozenset(s for s, joint in stages.nodes(data="joint") if joint)


def flow_order(stages: nx.DiGraph[int]) -> list[int]:
    """The stages in an order of data flow: by number, but that a plan numbers joint
    stages after all others, of which some may read them."""
    if not joint_stages(stages):
        return sorted(stages)
    return list(nx.lexicographical_topological_sort(stages))


def out_of_order(stages: nx.DiGraph[int]) -> tuple[int, int] | None:
    """A stage of microbatches, or joint in a circle, that a smaller one reads, and the
    one that reads it; None if the numbers are in the order of data flow."""
    joint = joint_stages(stages)
    for a, b in stages.edges:
        if a >= b and a not in joint:
            return a, b
    if joint and not nx.is_directed_acyclic_graph(stages):
        a, b = nx.find_cycle(stages)[0][:2]
        return int(a), int(b)
    return None


def fit_joint(schedule: Schedule, stages: nx.DiGraph[int]) -> Schedule:
    """The schedule for these stages: w and n say the same of all microbatches of a
    global-batch one, and caps that come with the schedule's shape are lifted where B
    waits for all F.

    Raises PlanError for a cap of the user's that stops the jobs, with the smallest that
    doesn't, and for updates of parts of the batch.
    """
    joint = joint_stages(stages)
    if not joint:
        return schedule
    _check_updates(schedule, min(joint))
    schedule = ask_once(schedule, joint)
    late = waiting_stages(stages, schedule.in_order)
    caps = schedule.in_flight
    if isinstance(caps, OwnCaps):
        lifted = frozenset(s for s in late if caps.cap(s) is not None)
        return replace(schedule, in_flight=replace(caps, lifted=lifted))
    _check_caps(schedule, late)
    return schedule


def _check_updates(schedule: Schedule, joint: int) -> None:
    every, count = schedule.update_every, schedule.microbatches
    alone = schedule.average_every is not None
    if every in (None, count) and not alone:
        return
    what = "average_every" if alone else "update_every"
    raise PlanError(
        f"{what}={schedule.average_every if alone else every}: rows of all {count} "
        f"microbatches meet in stage {joint}, whose gradients come once a call; give "
        f"update_every={count}, or None, and no average_every"
    )


def _check_caps(schedule: Schedule, late: dict[int, int]) -> None:
    """Raises PlanError for a cap that keeps a global-batch stage from all that it
    reads."""
    needs = {}
    for s in late:
        cap = schedule.cap(s)
        if cap is not None and cap < (least := max(holding(schedule, s).values())):
            needs[s] = least
    if not needs:
        return
    first, caps = min(needs), schedule.in_flight
    works, part = f"the smallest that works is {max(needs.values())}", ""
    if callable(caps):
        of = {s: s for s in needs}
        if isinstance(caps, CapsOfKnown):
            of = {s: caps.known.get(s, s) for s in needs}
        own = dict.fromkeys(of.values(), 0)
        for s, least in needs.items():
            own[of[s]] = max(own[of[s]], least)
        each = ", ".join(f"{least} for stage {s}" for s, least in own.items())
        works = f"the smallest that works is {each}"
        if of[first] != first:
            part = f" (of stage {of[first]} of the schedule)"
    raise PlanError(
        f"in_flight={schedule.cap(first)} stops the schedule: stage {late[first]} runs "
        f"once, on all rows ({late[first]}F*), so B of stage {first}{part} waits for F "
        f"of all {schedule.microbatches} microbatches; {works}"
    )


def ask_once(schedule: Schedule, joint: frozenset[int]) -> Schedule:
    """The schedule, whose w and n say of all microbatches of global-batch stages what
    they say of one: w of microbatch 0; n of the last for F, and of 0 for B and W."""
    last = schedule.microbatches - 1
    place = _PlacedOnce(schedule.w, joint)
    return replace(schedule, w=place, n=_RankedOnce(schedule.n, joint, last))


@dataclass(frozen=True, eq=False)
class _PlacedOnce:
    w: Place
    joint: frozenset[int]

    def __call__(self, s: int, b: int, d: Direction) -> Placement | tuple[int, int]:
        return self.w(s, 0 if s in self.joint else b, d)


@dataclass(frozen=True, eq=False)
class _RankedOnce:
    n: Priority
    joint: frozenset[int]
    last: int

    def __call__(self, s: int, b: int, d: Direction) -> int:
        if s in self.joint and d is not Direction.UPDATE:
            b = self.last if d is FORWARD else 0
        return self.n(s, b, d)


def waiting_stages(stages: nx.DiGraph[int], strict: bool) -> dict[int, int]:
    """Stages in microbatches whose B waits for F of all of them, in order, each with
    the first global-batch stage between its F and its B.

    strict: whether workers keep to the order of n, see order_phases: then F of all
        microbatches come before a global-batch one also in stages that it doesn't read.
    """
    joint, late = joint_stages(stages), {}
    above = {s: nx.ancestors(stages, s) for s in (stages if strict else joint)}
    meeting = {j for j in joint if above[j] - joint}
    back = [s for s, data in stages.nodes(data=True) if data["backward"] != 0]
    flow = _data_flow(stages, back)
    after = {j: nx.descendants(flow, (j, FORWARD)) for j in sorted(joint)}
    after |= {
        j: after[j] | nx.descendants(flow, (j, BACKWARD)) for j in joint & {*back}
    }
    for s in sorted(set(back) - joint):
        below = nx.descendants(stages, s)
        if strict:
            below |= meeting - above[s]
        for j in sorted(joint & below):
            if (s, BACKWARD) in after[j]:
                late[s] = j
                break
    return late


def _data_flow(
    stages: nx.DiGraph[int], back: Iterable[int]
) -> nx.DiGraph[tuple[int, Direction]]:
    """F and B of stages, and what waits for what."""
    trained = set(back)
    flow: nx.DiGraph[tuple[int, Direction]] = nx.DiGraph()
    flow.add_nodes_from((s, FORWARD) for s in stages)
    flow.add_edges_from(((s, FORWARD), (s, BACKWARD)) for s in trained)
    for s, reader in stages.edges:
        flow.add_edge((s, FORWARD), (reader, FORWARD))
        if {s, reader} <= trained:
            flow.add_edge((reader, BACKWARD), (s, BACKWARD))
    return flow


def joint_text(schedule: Schedule, stages: nx.DiGraph[int]) -> tuple[str, ...]:
    """Which stages are joint, and what becomes of caps, for people; a line, or none."""
    joint = sorted(joint_stages(stages))
    if not joint:
        return ()
    those = ", ".join(f"{s}*{_modules(stages, s)}" for s in joint)
    line = f"{those}: one job a direction, where the rows of all microbatches meet"
    caps = schedule.in_flight
    if isinstance(caps, OwnCaps) and caps.lifted:
        first, last = min(caps.lifted), max(caps.lifted)
        lifted = ", ".join(map(str, sorted(caps.lifted)))
        if len(caps.lifted) > 2 and caps.lifted == {*range(first, last + 1)}:
            lifted = f"{first}..{last}"
        line += f"; B waits for F of all, so in_flight is lifted for stages {lifted}"
    return (line,)


def _modules(stages: nx.DiGraph[int], stage: int) -> str:
    """The modules of a stage, where they are known."""
    names = stages.nodes[stage].get("modules")
    if not names:
        return ""
    return f" ({', '.join(names[:2])}{', ..' * (len(names) > 2)})"


def order_phases(jobs: Jobs) -> Jobs:
    """The jobs, with n such that workers can take them strictly by it, where the
    schedule's own would block: as 1f1b's order, with B before F of later microbatches.

    A global-batch job that waits for microbatches begins a phase: what waits for it
    comes after all that it waits for. Inside a phase global-batch jobs come first, the
    others by n; so if n is an order of the jobs without global-batch ones, this is one
    of those with them. Where it is none, as that of a schedule which is made for fewer
    stages, a job gets the n of the last that it waits for, after which it comes by its
    number: a greater n would put it behind others that wait for it, as F under a cap.
    """
    phases: list[int] = []
    for kind, before in enumerate(jobs.preds):
        last = max((phases[p] for p in before), default=0)
        begins = kind in jobs.joint and not jobs.joint.issuperset(before)
        phases.append(last + begins)
    n = list(jobs.n)
    for i, kind in enumerate(jobs.kind):
        same = [p for p in jobs.preds[kind] if phases[p] == phases[kind]]
        made = (jobs.find(p, jobs.rows[i]) for p in same if p not in jobs.joint)
        n[i] = max([n[i], *(n[number] for number in made)])
    least, span = min(n), max(n) - min(n) + 2
    n = [
        phases[kind] * span + (least - 1 if kind in jobs.joint else rank)
        for kind, rank in zip(jobs.kind, n, strict=True)
    ]
    return replace(jobs, n=n)
