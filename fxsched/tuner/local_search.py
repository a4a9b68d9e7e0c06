"""Looks for short orders of a placement's jobs: knobs first, then single moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from typing import Any

from ..jobs.job import Direction
from .evaluate_order import JobTimes, Orders, fits, length, replay
from .list_scheduler import FIRST, Knobs, fill
from .ordering_problem import OrderingProblem

# Where to begin: few W early; W in any gap; several stages a worker, in groups.
STARTS = (
    Knobs(),
    Knobs(fit=0.1, patience=0.0, first="late of a group", spare=2),
    Knobs(fit=0.1, patience=0.0, first="late"),
    Knobs(fit=0.7, full=0.3, idle=0.0, turns=True),
    Knobs(fit=0.5, idle=0.0, turns=True),
    Knobs(fit=0.5, patience=0.0, first="early of a group", turns=True),
    Knobs(fit=0.1, full=0.6, patience=0.3, idle=0.0, turns=True, first="late"),
    Knobs(fit=0.3, patience=0.3),
    Knobs(fit=0.9, full=0.3, patience=0.3, idle=0.0),
    Knobs(patience=0.0),
)
LOOPED = ("first", "deep", "spare")  # knobs for several stages a worker
VALUES: dict[str, Sequence[object]] = {
    "fit": (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0),
    "full": (0.0, 0.3, 0.6, 1.0),
    "patience": (0.0, 0.1, 0.2, 0.3, 0.5, 0.8),
    "idle": (0.0, 0.002, 0.005, 0.01, 0.02, 0.04, inf),
    "turns": (False, True),
    "first": FIRST,
    "deep": (False, True),
    "spare": (1, 2, 3, 5),
    "room": (1.0, 1.0, 0.9, 0.75, 0.6),
}
PROMISING = 1.03  # times the best: orders whose W are worth moving into gaps
ROUNDS = 5  # of moving them
DONE = 1.0005  # times the work of the busiest worker: short enough
FIRST_TRIES = 4  # knobs for every placement
TRIES = 300  # for the best placement
MOVING = 0.25  # of the budget, for single moves
MOVES = 3000


@dataclass
class Budget:
    """Jobs that may still be run on a clock."""

    jobs: float
    tell: Callable[[float], object] = lambda jobs: None  # how many are left

    def take(self, jobs: int) -> None:
        """Counts simulated jobs."""
        self.jobs -= jobs
        self.tell(self.jobs)


@dataclass
class Climber:
    """The best orders of one placement so far, and where to look next."""

    problem: OrderingProblem
    objective: str
    budget: Budget
    best: float = inf
    orders: Orders | None = None
    knobs: Knobs = STARTS[0]
    tried: int = 0

    @property
    def done(self) -> bool:
        """Whether no order can be much shorter."""
        return self.best <= self.problem.work * DONE

    def measure(self, orders: Orders) -> tuple[float, JobTimes | None]:
        """How long orders take, and each job's times; inf if they block."""
        self.budget.take(len(self.problem.jobs))
        times = replay(self.problem, orders)
        if times is None:
            return inf, None
        return length(orders, times, self.objective), times

    def keep(self, seconds: float, orders: Orders) -> bool:
        """Notes orders if they are the best so far."""
        if seconds >= self.best * (1 - 1e-9):
            return False
        self.best, self.orders = seconds, orders
        return True

    def step(self, random: Random) -> None:
        """Tries other knobs: the next to begin with, or some near the best."""
        new = self.tried < len(STARTS)
        knobs = STARTS[self.tried] if new else self.near(random)
        self.tried += 1
        self.budget.take(2 * len(self.problem.jobs))  # filling is the slower clock
        orders = fill(self.problem, knobs)
        if orders is None:
            return
        seconds, times = self.measure(orders)
        better = self.keep(seconds, orders)
        for fit in (1.0, 0.5):
            if times is not None and seconds < self.best * PROMISING:
                better |= self.pull(orders, times, fit)
        if better:
            self.knobs = knobs

    def near(self, random: Random) -> Knobs:
        """Other knobs: some of the best ones changed."""
        names = [name for name in VALUES if self.problem.looped or name not in LOOPED]
        changed = random.sample(names, random.choice((1, 2, 2, 3, len(names))))
        values: dict[str, Any] = {name: random.choice(VALUES[name]) for name in changed}
        return self.knobs._replace(**values)

    def pull(self, orders: Orders, times: JobTimes, fit: float) -> bool:
        """Moves W into earlier gaps as long as orders change; whether one is best."""
        better = False
        for _ in range(ROUNDS):
            moved = pull_weights(self.problem, orders, times, fit)
            if moved == orders:
                break
            seconds, new = self.measure(moved)
            better |= self.keep(seconds, moved)
            if new is None:
                break
            orders, times = moved, new
        return better

    def move(self, random: Random) -> None:
        """Puts a job elsewhere in its worker's order; keeps what isn't worse."""
        assert self.orders is not None
        several = [w for w, order in enumerate(self.orders) if len(order) > 1]
        if not several:
            return
        w = random.choice(several)
        order = list(self.orders[w])
        i = random.randrange(len(order))
        distance = random.choice((1, 1, 2, 3, 5, 8)) * random.choice((-1, 1))
        order.insert(min(max(i + distance, 0), len(order) - 1), order.pop(i))
        if not fits(self.problem, w, order):
            return
        orders = (*self.orders[:w], tuple(order), *self.orders[w + 1 :])
        seconds, _ = self.measure(orders)
        if seconds <= self.best:
            self.best, self.orders = seconds, orders


def climb(climbers: Sequence[Climber], random: Random, budget: Budget) -> None:
    """Spends the budget on the placements: of those tried so far, the better half has
    twice as many knobs tried, until one is left; then its jobs are moved one by one.
    """
    active, tries = list(climbers), FIRST_TRIES
    last = MOVING * budget.jobs
    while active and tries <= TRIES:
        for _ in range(tries):
            for climber in active:
                enough = budget.jobs <= last and climber.tried >= FIRST_TRIES
                if not enough and not climber.done:
                    climber.step(random)
        active = sorted(active, key=lambda c: c.best)[: (len(active) + 1) // 2]
        if active[0].done:
            return
        tries *= 2
    for _ in range(MOVES):
        if not active or active[0].orders is None or budget.jobs <= 0:
            return
        active[0].move(random)


def pull_weights(
    problem: OrderingProblem, orders: Orders, times: JobTimes, fit: float
) -> Orders:
    """W moved into the gaps before them, where F and B stay when they are.

    fit: the share of W that a gap must have room for.
    """
    pulled = []
    kind, directions = problem.jobs.kind, [d for _, d in problem.jobs.kinds]
    for order in orders:
        weights = [j for j in order if directions[kind[j]] is Direction.WEIGHT]
        after: list[int] = []
        done, next_one, now = set[int](), 0, 0.0
        # a W's only predecessor is its B
        ready = {j: times.end[problem.preds[j][0][0]] for j in weights}
        for j in order:
            if j in done:
                continue
            while j not in ready and next_one < len(weights) and after:
                w = weights[next_one]
                taken = problem.seconds[kind[w]]
                if w not in done:
                    if times.start[j] - now < fit * taken or ready[w] > now:
                        break
                    after.append(w)
                    done.add(w)
                    now += taken
                next_one += 1
            after.append(j)
            done.add(j)
            now = max(now, times.start[j]) + problem.seconds[kind[j]]
        pulled.append(tuple(after))
    return tuple(pulled)
