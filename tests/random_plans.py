"""Random plans (DAGs of 2 to 6 stages, w, n, caps, carry, order, prefetch, and where
activations wait) by seed: checked, run on threads or ranks, and compared with eager
PyTorch."""

from __future__ import annotations

import dataclasses
import random
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

import fxsched
from fxsched import Backend, Direction, PlanError, Schedule
from fxsched.schedules import parked

from .traced_once import Switch, stages_traced_once

STAGES, MICROBATCHES, WORKERS = 6, 4, 4  # at most
FEATURES = 3


class Node(nn.Module):
    """One node of a DAG: tanh of a linear map of what it reads, joined or summed."""

    def __init__(self, reads: int, joined: bool, bias: bool) -> None:
        super().__init__()
        self.joined = joined
        width = FEATURES * reads if joined else FEATURES
        self.linear = nn.Linear(width, FEATURES, bias=bias)

    def forward(self, *values: Tensor) -> Tensor:
        x = torch.cat(values, -1) if self.joined else torch.stack(values).sum(0)
        return torch.tanh(self.linear(x))


class Dag(nn.Module):
    """Nodes in an order of data flow; node i reads `reads[i]`, where -1 is x and -2 y.

    Returns the loss over all sinks, or, with returns="rows", their values.
    """

    def __init__(self, nodes: list[Node], reads: list[list[int]], returns: str) -> None:
        super().__init__()
        self.nodes = nn.ModuleList(nodes)
        self.reads, self.returns = reads, returns
        self.sinks = sorted(set(range(len(nodes))) - {p for r in reads for p in r})

    def forward(self, x: Tensor, y: Tensor) -> Tensor | tuple[Tensor, ...]:
        made = {-1: x, -2: y}
        for i, node in enumerate(self.nodes):
            made[i] = node(*[made[p] for p in self.reads[i]])
        sinks = tuple(made[s] for s in self.sinks)
        return loss_of(sinks) if self.returns == "loss" else sinks


def loss_of(values: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([(v - i).pow(2).mean() for i, v in enumerate(values)]).sum()


class Case(NamedTuple):
    """A random model, how it is cut, scheduled and run; rows of a microbatch."""

    model: Dag
    schedule: Schedule
    stages: str | tuple[str, ...]
    order: str
    carry: str
    rows: int
    x_trains: bool
    prefetch: int


def random_case(seed: int, workers: int | None = None) -> Case:
    """The case of a seed, for so many workers; for any number of up to WORKERS."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    count = choose.randint(2, STAGES)
    model = random_dag(choose, count)
    named = choose.random() < 0.5
    names = tuple(f"nodes.{i}" for i in range(choose.randint(0, 1), count))
    order = choose.choice(("static", "dynamic"))
    return Case(
        model,
        random_schedule(
            choose, count if named or choose.random() < 0.8 else None, workers
        ),
        names if named else "auto",
        order,
        choose.choice(("saved", "recompute")),
        choose.randint(1, 3),
        choose.random() < 0.3,
        choose.randint(0, 3),
    )


def with_updates(case: Case, seed: int) -> Case:
    """The case with steps of the optimizer in the program, some on earlier versions of
    the weights."""
    choose = random.Random(seed)
    count, schedule = case.schedule.microbatches, case.schedule
    every = choose.choice([k for k in (1, 2, 4) if count % k == 0])
    share = choose.choice((None, choose.random()))

    def seen(s: int, b: int, d: Direction) -> int:
        return int((share or 0.0) * (b // every))

    version = None if share is None else seen
    schedule = dataclasses.replace(schedule, update_every=every, version=version)
    case.model.returns = "loss"
    return case._replace(schedule=schedule)


def random_family(seed: int, count: int) -> list[Case]:
    """Cases of one model and batch, under so many random schedules."""
    first = random_case(seed)
    choose = random.Random(-seed - 1)
    cases = [first]
    for _ in range(count - 1):
        schedule = random_schedule(choose, first.schedule.stages, None)
        microbatches = first.schedule.microbatches
        cases.append(
            first._replace(
                schedule=dataclasses.replace(schedule, microbatches=microbatches),
                order=choose.choice(("static", "dynamic")),
                carry=choose.choice(("saved", "recompute")),
                prefetch=choose.randint(0, 3),
            )
        )
    return cases


def random_dag(choose: random.Random, count: int) -> Dag:
    reads, nodes = [], []
    for i in range(count):
        known = [-2, -1, *range(i)]
        count_read = choose.randint(1, min(3, len(known)))
        reads.append(sorted(choose.sample(known, count_read)))
        node = Node(len(reads[i]), choose.random() < 0.5, choose.random() < 0.8)
        if choose.random() < 0.1:
            node.linear.weight.requires_grad_(False)
        alike = [o for o in nodes if o.linear.weight.shape == node.linear.weight.shape]
        if alike and choose.random() < 0.2:
            node.linear.weight = choose.choice(alike).linear.weight
        nodes.append(node)
    return Dag(nodes, reads, choose.choice(("loss", "loss", "loss", "rows")))


def random_schedule(
    choose: random.Random, stages: int | None, workers: int | None
) -> Schedule:
    drawn = choose.randint(1, WORKERS)
    workers = workers or drawn
    jobs = [
        (s, b, d) for s in range(STAGES) for b in range(MICROBATCHES) for d in Direction
    ]
    place = {j: (choose.randrange(workers), choose.randrange(workers)) for j in jobs}
    n = {job: choose.randint(-9, 9) for job in jobs}
    caps = [choose.choice((None, 1, 2, 3)) for _ in range(STAGES)]
    drawn_schedule = Schedule(
        workers,
        choose.randint(1, MICROBATCHES),
        stages,
        w=lambda s, b, d: place[s, b, d],
        n=lambda s, b, d: n[s, b, d],
        in_flight=choose.choice((None, choose.randint(1, 3), caps.__getitem__)),
        split_backward=choose.random() < 0.4,
        name="random",
    )
    if choose.random() < 0.4:
        return drawn_schedule
    places = (None, "disk", *range(workers))
    saved = {(s, b): choose.choice(places) for s, b, _ in jobs}
    return parked(drawn_schedule, lambda s, b: saved[s, b])


def with_room(case: Case, refusal: PlanError) -> Case:
    """The case with the cap that a refusal says works."""
    text, given = str(refusal), case.schedule.in_flight
    assert text.startswith("in_flight stops the schedule"), text
    cap: int | Callable[[int], int | None]
    if callable(given):
        found = re.search(r"larger by (\d+) for every stage works", text)
        assert found is not None, text
        extra = int(found[1])
        cap = lambda s: None if given(s) is None else given(s) + extra  # noqa: E731
    else:
        found = re.search(r"the smallest that works is (\d+)", text)
        assert found is not None, text
        cap = int(found[1])
    schedule = dataclasses.replace(case.schedule, in_flight=cap)
    return case._replace(schedule=schedule)


class Results(NamedTuple):
    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor | None]


def batch(case: Case) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(case.rows)
    size = (case.rows * case.schedule.microbatches, FEATURES)
    x, y = (torch.randn(size, generator=generator) for _ in range(2))
    return x.requires_grad_(case.x_trains), y


def collect(model: Dag, outputs: tuple[Tensor, ...], x: Tensor) -> Results:
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return Results(outputs, gradients | {"x": x.grad})


def run_eager(case: Case) -> Results:
    """The microbatches one after the other, their losses averaged."""
    x, y = batch(case)
    count = case.schedule.microbatches
    parts = []
    for mx, my in zip(x.chunk(count), y.chunk(count), strict=True):
        out = case.model(mx, my)
        loss = out if isinstance(out, Tensor) else loss_of(out)
        if loss.requires_grad:
            (loss / count).backward()
        parts.append((loss,) if isinstance(out, Tensor) else out)
    if case.model.returns == "loss":
        total = torch.stack([loss for (loss,) in parts]).mean()
        return collect(case.model, (total,), x)
    outputs = tuple(torch.cat(each) for each in zip(*parts, strict=True))
    return collect(case.model, outputs, x)


def backend_of(case: Case, transport: str) -> Backend:
    return fxsched.backend(
        *(case.schedule, case.stages, transport, case.order, case.carry),
        prefetch=case.prefetch,
    )


def run_planned(case: Case, transport: str, switch: Switch | None = None) -> Results:
    x, y = batch(case)
    with backend_of(case, transport) as backend:
        run = torch.compile(case.model, backend=backend) if switch is None else switch
        out = run(x, y) if switch is None else switch(backend, x, y)
        assert backend.plan is not None
        backend.plan.check()
        loss = out if isinstance(out, Tensor) else loss_of(out)
        if loss.requires_grad:
            loss.backward()
    return collect(case.model, (out,) if isinstance(out, Tensor) else out, x)


def assert_family_equals_eager(cases: Sequence[Case]) -> None:
    """All of one model, which is traced once; on threads."""
    expected = run_eager(cases[0])
    switch = Switch(cases[0].model, backend_of(cases[0], "threads"))
    with stages_traced_once():
        for case in cases:
            assert_equals_eager(case, expected=expected, switch=switch)


def assert_equals_eager(
    case: Case,
    transport: str = "threads",
    expected: Results | None = None,
    switch: Switch | None = None,
) -> None:
    """Also that a rank of several has the gradients of what it keeps alone."""
    expected = expected or run_eager(case)
    try:
        found = run_planned(case, transport, switch)
    except PlanError as refusal:
        found = run_planned(with_room(case, refusal), transport, switch)
    for want, got in zip(expected.outputs, found.outputs, strict=True):
        assert torch.allclose(want, got, rtol=1e-5, atol=1e-6), (want, got)
    for name, want in expected.gradients.items():
        got = found.gradients[name]
        if got is None and transport != "threads":
            continue
        assert (want is None) == (got is None), (name, want, got)
        if want is not None and got is not None:
            assert torch.allclose(want, got, rtol=1e-5, atol=1e-6), (name, want, got)


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raises TimeoutError if workers wait for each other for ever."""

    def stop(signum: int, frame: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
