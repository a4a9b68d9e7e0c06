"""How ranks stay together: what each is at, who has failed, and how long to wait.

Every call of a backend has a number and every plan too, the same on all ranks. Each
message says which call, plan and inputs it is of, its Mark: one of another call is not
taken, one of the same call that is otherwise of another mark is an error.

While all goes well nothing else is sent. A rank that plans or fails writes it to a
board that all can read, the store of the process group; one that has waited for TICK
seconds writes what it waits for, and reads the board every TICK from then on. It stops
if it finds a rank that has failed, closed or ended its script, that plans a call which
it runs itself, or that runs the same call with another mark; if the rank that it waits
for has gone on to a later call, or waits for this one in a call of another kind; and
after `limit` seconds. What stops a rank makes it fail, so that all others stop for the
same reason. After that the ranks meet again in `reset`.

Backends, and calls such as fxsched.save, each connect the ranks anew: a group, whose
number begins the keys of its part of the board. Under keys without one a rank writes
what it waits for in any of them, and that its script has ended.

Before it makes a plan, a rank meets the others: all say what they plan for, and go on
together or not at all.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..jobs.job import PlanError
from .board import TICK, Board, Mark, Status, Store
from .endpoints import Where
from .failure_detector import LATE, FailureDetector

LONG = 10.0  # seconds of waiting that a line on stderr tells of
GRACE = 2 * TICK  # seconds in which a rank that fails has said so
BUSY = 10.0  # seconds that a rank may compute before it says that it has lost one
SAME = "every rank makes the same calls in the same order"
LATEST = 64  # calls whose marks are remembered


class Control:
    """This rank's part in it.

    limit: seconds that it waits at most. store: None if there is no board.
    group: the number of the group. what: what the ranks are at. beside: whether it is
        of a thread beside the training, which says nothing of what the rank is at.
    calls, plans: begun so far. finished: calls and backward() that ended well.
    failure: why this rank cannot go on, or None.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        limit: float,
        store: Store | None = None,
        numbers: tuple[int, int] = (0, 0),
        group: int = 0,
        what: str = "the start of a backend",
        beside: bool = False,
    ) -> None:
        self.rank, self.ranks, self.limit = rank, ranks, limit
        self.group, self.what, self.beside = group, what, beside
        self.looks: dict[int, Status] = {}  # in this wait, at ranks in other groups
        self.since = 0.0  # when it began
        self.apart = False  # whether ranks wait for each other in several groups
        self.board = None if store is None else Board(store, limit)
        self.detector = FailureDetector()
        self.calls, self.plans = numbers
        self.finished = self.resets = 0
        self.names: dict[int, str] = {}  # of plans
        self.marks: dict[int, Mark] = {}  # of the latest calls here
        self.latest = Mark(0, 0)
        self.early: dict[tuple[int, int], Mark] = {}  # of calls to come: rank, call
        self.failure: str | None = None
        self.whom: int | None = None  # that the last long wait was for; None for all
        self.changed = threading.Lock()  # readers of links note marks too
        self.patience = LONG
        self.told = 0.0  # when the wait began that a line told of
        self.written: Status | None = None
        self.write("here")

    def write(
        self,
        kind: str,
        mark: Mark | None = None,
        text: str = "",
        whom: int | None = None,
        beat: int = 0,
    ) -> None:
        """Tells the others what this rank is at."""
        mark = mark or Mark(self.calls, self.plans)
        status = Status(kind, mark, self.plans, text, whom, beat, self.group)
        if self.board is not None and status != self.written:
            self.written = status
            self.board.write(self._key(f"rank {self.rank}"), status)
            if not self.beside and (beat or kind in ("here", "ended")):
                self.board.write(f"rank {self.rank}", status)

    def read(self, rank: int) -> Status:
        """What a rank last wrote on the board."""
        assert self.board is not None
        return self.board.read(self._key(f"rank {rank}"))

    def _key(self, name: str) -> str:
        return f"group {self.group} {name}"

    def begin(self, mark: Mark) -> None:
        """Notes a call's mark, and raises PlanError if another rank has another."""
        with self.changed:
            self.marks[mark.call] = self.latest = mark
            self.marks.pop(mark.call - LATEST, None)
            early = [key for key in self.early if key[1] == mark.call]
            others = [(rank, self.early.pop((rank, call))) for rank, call in early]
        for rank, other in others:
            self.check_mark(rank, other)

    def check_mark(self, rank: int, other: Mark) -> None:
        """Raises PlanError if a rank's mark isn't this rank's of the same call."""
        with self.changed:
            mine = self.marks.get(other.call)
            if mine is None and other.call >= self.calls:
                self.early[rank, other.call] = other
        if mine is not None and _differ(mine, other):
            raise PlanError(self._apart(rank, other, mine))

    def _apart(self, rank: int, other: Mark, mine: Mark) -> str:
        if mine.plan == other.plan:
            return (
                f"rank {rank} runs call {mine.call} with other inputs than rank "
                f"{self.rank} ({self.names.get(mine.plan)}); pass the same batch to "
                "the model on every rank, and leave out no call on one of them"
            )
        return (
            f"rank {rank} runs call {mine.call} as {self._plan(other.plan)}, rank "
            f"{self.rank} as {self._plan(mine.plan)}; every rank makes the same calls "
            "of the model in the same order, also to evaluate"
        )

    def _plan(self, number: int) -> str:
        return f"plan {number} ({self.names.get(number, 'unknown here')})"

    def idle(
        self, rank: int | None, mark: Mark | None, began: float, where: str = ""
    ) -> None:
        """Called every TICK of a wait that began then, on time.monotonic().

        rank: whom it is for; None for all. mark: of the call; None while it plans.
        Raises PlanError, ConnectionError or TimeoutError if it is in vain.
        """
        self.whom = rank
        seconds = time.monotonic() - began
        whom = "all ranks" if rank is None else f"rank {rank}"
        call = self.calls if mark is None else mark.call
        at = f"for {whom}"
        at += f" {self._at(call)}" if call or not where else ""
        at += f", {where}" if where else ""
        beat = int(seconds / TICK)
        with self._asking(began, at):
            if mark is None and call:
                self.write("plans", None, self.names.get(self.plans, ""), rank, beat)
            else:
                self.write("waits", mark, f"waits {at}", rank, beat)
            others = self._others()
            self.detector.note(others)
            for other, status in others.items():
                self._judge(other, status, mark, other == rank and seconds >= LONG)
            if seconds >= min(LONG, self.limit / 2):
                self._look_elsewhere(rank, at, began, True)
        if seconds >= self.limit:
            chain = "".join(f"; {line}" for line in self.detector.chain(rank))
            raise TimeoutError(f"rank {self.rank} waited {seconds:.3g} s {at}{chain}")
        self._say(began, at)

    def next(self, arrived: queue.SimpleQueue[int], mark: Mark, where: Where) -> int:
        """The next tag that a queue gets, which may be in vain; see idle."""
        began = time.monotonic()
        while True:
            try:
                return arrived.get(timeout=TICK)
            except queue.Empty:
                rank, job = where()
                self.idle(rank, mark, began, job)

    @contextlib.contextmanager
    def _asking(self, began: float, at: str) -> Iterator[None]:
        """Where the board is asked in a wait, whose line is said, and whose end is
        kept, also if the store does not answer."""
        if (board := self.board) is None:
            yield
            return
        board.until, board.asked = began + self.limit, lambda: self._say(began, at)
        try:
            yield
        except TimeoutError as error:
            seconds = time.monotonic() - began
            raise TimeoutError(
                f"rank {self.rank} waited {seconds:.3g} s {at}; {error}"
            ) from None
        finally:
            board.until, board.asked = math.inf, lambda: None

    def _at(self, call: int) -> str:
        return f"at call {call}" if call else f"at {self.what}"

    def _look_elsewhere(
        self, rank: int | None, at: str, began: float, long: bool
    ) -> None:
        """Raises if a rank that this one waits for has ended its script, or, after a
        long wait, if it waits for this one in another group, where its beats go on."""
        assert self.board is not None
        if began != self.since:
            self.since, self.looks = began, {}
        for other in range(self.ranks):
            key = f"rank {other}"
            if other == self.rank or self.beside or not self.board.check([key]):
                continue
            status, last = self.board.read(key), self.looks.get(other)
            self.looks[other] = status
            if status.kind == "ended" and rank in (None, other):
                raise self._ended(status, at)
            if last is None or not last.group == status.group != self.group:
                continue
            if 0 < last.beat < status.beat:
                self.detector.note({other: status})
                its = self.detector.waiting(other)
                if long and rank in (None, other) and status.whom in (None, self.rank):
                    self.apart = True
                    raise PlanError(f"rank {self.rank} waits {at}, and {its}; {SAME}")

    def _ended(self, status: Status, at: str) -> ConnectionError:
        return ConnectionError(
            f"{status.text}, and rank {self.rank} waits {at}; {SAME}"
        )

    def _say(self, began: float, at: str) -> None:
        """Tells the user of a long wait, once; of later ones if they are longer."""
        seconds = time.monotonic() - began
        if seconds >= self.patience and began != self.told:
            self.told, self.patience = began, 2 * self.patience
            line = f"fxsched: rank {self.rank} waits {seconds:.0f} s {at}"
            print(line, file=sys.stderr, flush=True)

    def _others(self) -> dict[int, Status]:
        if self.board is None:
            return {}
        try:
            return {r: self.read(r) for r in range(self.ranks) if r != self.rank}
        except RuntimeError as error:
            raise _gone() from error

    def _judge(self, rank: int, status: Status, mark: Mark | None, long: bool) -> None:
        """Raises if a rank is where this one can't be together with it."""
        call = self.calls if mark is None else mark.call
        its = status.mark.call
        if status.kind in ("departed", "apart"):
            self.apart = status.kind == "apart"
            raise PlanError(status.text)
        if status.kind == "failed":
            raise ConnectionError(status.text)
        if status.kind == "closed" and (
            its < call or long
        ):  # else it has done its part
            raise ConnectionError(status.text)
        if status.kind == "ended" and its < call:
            raise self._ended(status, f"for it {self._at(call)}")
        if status.kind == "waits":
            if mark is None and its >= call and status.plans < self.plans:
                name = self.names.get(self.plans)
                raise PlanError(self._planned(self.rank, call, name, rank))
            self.check_mark(rank, status.mark)
        if status.kind in ("waits", "plans") and long and its > call:
            raise PlanError(
                f"rank {rank} is at call {its} already, rank {self.rank} at call "
                f"{call}; every rank makes the same calls of the model, and of "
                "backward() after each"
            )
        # of as many plans as here it may have been some calls ago; plan() compares them
        if status.kind == "plans" and status.plans > self.plans and its <= call:
            raise PlanError(self._planned(rank, its, status.text, self.rank))

    def _planned(self, rank: int, call: int, text: str | None, other: int) -> str:
        return (
            f"rank {rank} plans call {call} anew, for {text}, and rank {other} runs it "
            "by an earlier plan; every rank makes the same calls of the model, with "
            "equal shapes, types and modes, also to evaluate"
        )

    def lost(self, rank: int | None) -> Exception:
        """What to raise where the connection to a rank, None for some, has ended: why,
        if it said."""
        try:
            self._judge_all(rank)
            whom = self._unheard(rank)
        except (PlanError, ConnectionError, TimeoutError) as error:
            return error
        ranks = " or ".join(f"rank {each}" for each in whom)
        return ConnectionError(
            f"rank {self.rank} lost {ranks} {self._at(self.calls)}: its process, or "
            "the network to it, has ended"
        )

    def _judge_all(self, rank: int | None) -> dict[int, Status]:
        """What the others are at; raises what one says of why this one can't go on.

        rank: whose connection has ended; None for some.
        """
        others = self._others()
        for other, status in others.items():
            if status.kind == "ended" and rank in (None, other):
                raise self._ended(status, f"for it {self._at(self.calls)}")
            self._judge(other, status, self.marks.get(self.calls), False)
        return others

    def _unheard(self, rank: int | None) -> list[int]:
        """The ranks that write nothing for a while: one that fails breaks connections,
        which who waits for it may see before it has said why."""
        if self.failure is None:
            self.write("lost", None, "has lost a rank", None, 1)
        before = self._others()
        unheard = list(before) or [r for r in range(self.ranks) if r != self.rank]
        began = time.monotonic()
        until = began + max(LATE, min(BUSY, self.limit / 4))
        while before and time.monotonic() < until:
            if len(unheard) <= 1 and time.monotonic() > began + GRACE:
                break
            time.sleep(TICK / 10)
            now = self._judge_all(rank)
            unheard = [
                r for r in unheard if now[r].kind != "lost" and now[r] == before[r]
            ]
        lost = [r for r in unheard if r == rank] or unheard
        return lost or ([*before] if rank is None else [rank])

    def fail(self, error: BaseException) -> None:
        """Tells the others that this rank cannot go on."""
        if self.failure is not None:
            return
        if isinstance(error, PlanError):
            kind, self.failure = "apart" if self.apart else "departed", str(error)
        elif isinstance(error, ConnectionError):
            kind, self.failure = "failed", str(error)
        else:
            kind = "failed"
            notes = getattr(error, "__notes__", [])
            place = next((n for n in notes if n.startswith("fxsched: in ")), "")
            text = f"{type(error).__name__}: {error}"
            text += place.replace("fxsched: in", "\n  in", 1)
            self.failure = f"rank {self.rank} failed at call {self.calls}: {text}"
        with contextlib.suppress(RuntimeError, TimeoutError):  # others find none either
            self.write(kind, None, self.failure)

    def close(self) -> None:
        """Tells the others that this rank takes no part any longer; after a failure
        they know, and why."""
        failed = self.failure is not None
        self.failure = f"rank {self.rank} has closed its backend"
        with contextlib.suppress(RuntimeError, TimeoutError):
            if not failed:
                self.write("closed", None, f"{self.failure} after call {self.calls}")
        self.leave()

    def end(self, how: str) -> None:
        """Tells the others that the script of this rank has ended."""
        if self.failure is None and self.board is not None:
            self.board.limit = GRACE  # which the end of Python waits at most
            after = f" after call {self.calls}" if self.calls else ""
            with contextlib.suppress(RuntimeError, TimeoutError):
                self.write(
                    "ended", None, f"rank {self.rank} ended its script{how}{after}"
                )

    def leave(self) -> None:
        """Ends the thread that asks the board."""
        if self.board is not None:
            self.board.close()

    def ready(self) -> None:
        """Raises PlanError after a failure."""
        if self.failure is not None:
            raise PlanError(
                f"{self.failure}\nSince then the ranks are not together: call "
                "backend.reset() on every rank, then the model again"
            )

    def meet(
        self, name: str, value: Any, idle: Callable[[float], None] | None = None
    ) -> list[Any]:
        """Every rank's value of something small, once all have come to this name.

        idle: what is called every TICK, with when the wait began.
        """
        assert self.board is not None
        keys = [self._key(f"{name}/{rank}") for rank in range(self.ranks)]
        self.board.set(keys[self.rank], json.dumps(value))
        began = due = time.monotonic()
        pause = 0.001
        try:
            while not self.board.check(keys):
                if time.monotonic() >= due + TICK:
                    due = time.monotonic()
                    (idle or self._starting)(began)
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
            return [json.loads(self.board.get(key)) for key in keys]
        except RuntimeError as error:
            raise _gone() from error

    def _starting(self, began: float) -> None:
        """Waits without a look at who failed: for ranks to connect, or to reset."""
        assert self.board is not None
        seconds, at = time.monotonic() - began, f"for all ranks at {self.what}"
        mark, beat = Mark(self.calls, self.plans), int(seconds / TICK)
        status = Status(
            "waits", mark, self.plans, f"waits {at}", None, beat, self.group
        )
        if not self.beside:
            self.board.write(f"rank {self.rank}", status)
        self._look_elsewhere(None, at, began, seconds >= min(LONG, self.limit / 2))
        if seconds >= self.limit:
            raise TimeoutError(f"rank {self.rank} waited {seconds:.3g} s {at}; {SAME}")
        self._say(began, at)

    def plan(self, text: str) -> list[str]:
        """Meets the others to make a plan; what each of them makes it for.

        text: what this rank makes it for. Raises PlanError if another rank does so at
        another call, or runs this call by an earlier plan.
        """
        self.plans += 1
        self.names[self.plans] = text
        self.write("plans", None, text)
        everyone = self.meet(
            f"plan {self.plans}",
            [self.calls, text],
            lambda began: self.idle(None, None, began, "which they plan"),
        )
        for rank, (call, other) in enumerate(everyone):
            if call != self.calls:
                raise PlanError(
                    f"rank {rank} plans call {call} for {other}, rank {self.rank} call "
                    f"{self.calls} for {text}; every rank makes the same calls of the "
                    "model"
                )
        return [text for _, text in everyone]


def _differ(one: Mark, other: Mark) -> bool:
    inputs = one.inputs and other.inputs and one.inputs != other.inputs
    return one.plan != other.plan or bool(inputs)


def _gone() -> ConnectionError:
    return ConnectionError(
        "the store of the process group is gone: the process that holds it has ended"
    )
