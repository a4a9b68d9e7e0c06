"""Looks for short orders of a placement's jobs: knobs first, then single moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from random import Random

from .fill import FIRST, Knobs, fill
from .jobs import Direction
from .tasks import Orders, Task, Times, fits, length, replay

# Where to begin: few W early; W in any gap; several stages a worker, in groups.
STARTS = (
    Knobs(),
    Knobs(fit=0.1, patience=0.0, first="late of a group", spare=2),
    Knobs(fit=0.5, patience=0.2, idle=0.0, turns=True),
    Knobs(fit=0.1, patience=0.0, first="late"),
    Knobs(fit=0.7, full=0.3, patience=0.2, idle=0.0, turns=True),
    Knobs(fit=0.1, full=0.6, patience=0.3, idle=0.0, turns=True, first="late"),
    Knobs(patience=0.0),
    Knobs(fit=0.5, patience=0.0, first="early of a group", turns=True),
    Knobs(fit=0.5, patience=0.5, idle=0.0, first="late", turns=True, full=1.0),
)
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
TRIES = 250  # knobs for a placement
MOVES = 2000  # single moves


@dataclass
class Budget:
    """Jobs that may still be run on a clock."""

    jobs: float
    spend: Callable[[int], object] = lambda jobs: None  # told of each run

    def take(self, jobs: int) -> None:
        self.jobs -= jobs
        self.spend(jobs)


@dataclass
class Climber:
    """The best orders of one placement so far, and where to look next."""

    task: Task
    objective: str
    budget: Budget
    best: float = inf
    orders: Orders | None = None
    knobs: Knobs = STARTS[0]
    tries: Iterator[int] = field(default_factory=count)

    @property
    def done(self) -> bool:
        return self.best <= self.task.work * DONE

    def measure(self, orders: Orders) -> tuple[float, Times | None]:
        self.budget.take(len(self.task.jobs))
        times = replay(self.task, orders)
        if times is None:
            return inf, None
        return length(orders, times, self.objective), times

    def keep(self, seconds: float, orders: Orders) -> bool:
        if seconds >= self.best * (1 - 1e-9):
            return False
        self.best, self.orders = seconds, orders
        return True

    def step(self, random: Random) -> None:
        """Tries other knobs: the next to begin with, or some near the best."""
        number = next(self.tries)
        knobs = STARTS[number] if number < len(STARTS) else self.near(random)
        self.budget.take(2 * len(self.task.jobs))  # filling is the slower clock
        orders = fill(self.task, knobs)
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
        names = list(VALUES)
        changed = random.sample(names, random.choice((1, 2, 2, 3, len(names))))
        return self.knobs._replace(
            **{name: random.choice(VALUES[name]) for name in changed}
        )

    def pull(self, orders: Orders, times: Times, fit: float) -> bool:
        """Moves W into earlier gaps as long as orders change; whether one is best."""
        better = False
        for _ in range(ROUNDS):
            moved = pull_weights(self.task, orders, times, fit)
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
        w = random.choice([w for w, order in enumerate(self.orders) if len(order) > 1])
        order = list(self.orders[w])
        i = random.randrange(len(order))
        far = random.choice((1, 1, 2, 3, 5, 8)) * random.choice((-1, 1))
        order.insert(min(max(i + far, 0), len(order) - 1), order.pop(i))
        if not fits(self.task, w, order):
            return
        orders = (*self.orders[:w], tuple(order), *self.orders[w + 1 :])
        seconds, _ = self.measure(orders)
        if seconds <= self.best:
            self.best, self.orders = seconds, orders


def climb(climbers: Sequence[Climber], random: Random, budget: Budget) -> None:
    """Spends the budget on the placements; the better half of them gets the next
    share, until one is left, whose jobs are then moved one by one.

    Every placement has its first knobs tried.
    """
    active = list(climbers)
    for climber in active:
        for _ in STARTS:
            climber.step(random)
    whole = budget.jobs
    while active and budget.jobs > 0.25 * whole:
        active = sorted(active, key=lambda c: c.best)[: max((len(active) + 1) // 2, 1)]
        if active[0].done:
            return
        share = budget.jobs - (0.25 if len(active) == 1 else 0.6) * whole
        end = budget.jobs - max(share, 0.2 * whole)
        for _ in range(TRIES // len(active)):
            for climber in active:
                if budget.jobs > end and not climber.done:
                    climber.step(random)
        if len(active) == 1:
            break
    best = min(climbers, key=lambda c: c.best, default=None)
    for _ in range(MOVES):
        if best is None or best.orders is None or best.done or budget.jobs <= 0:
            return
        best.move(random)


def pull_weights(task: Task, orders: Orders, times: Times, fit: float) -> Orders:
    """W moved into the gaps before them, where F and B stay when they are.

    fit: the share of W that a gap must have room for.
    """
    found = []
    width, directions = len(task.seconds), [d for _, d in task.jobs.kinds]
    for order in orders:
        weights = [j for j in order if directions[j % width] is Direction.WEIGHT]
        after: list[int] = []
        done, next_one, now = set[int](), 0, 0.0
        ready = {j: times.end[j + _back(task, j % width)] for j in weights}
        for j in order:
            if j in done:
                continue
            while j not in ready and next_one < len(weights) and after:
                w = weights[next_one]
                taken = task.seconds[w % width]
                if w not in done:
                    if times.start[j] - now < fit * taken or ready[w] > now:
                        break
                    after.append(w)
                    done.add(w)
                    now += taken
                next_one += 1
            after.append(j)
            done.add(j)
            now = max(now, times.start[j]) + task.seconds[j % width]
        found.append(tuple(after))
    return tuple(found)


def _back(task: Task, k: int) -> int:
    """How far the B of a W is."""
    return task.jobs.preds[k][0] - k
