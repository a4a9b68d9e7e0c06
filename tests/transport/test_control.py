"""What ranks make of what the others have written on the board."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from fxsched import PlanError
from fxsched.transport.board import Board, Mark, Status
from fxsched.transport.control import Control
from fxsched.transport.failure_detector import LATE, FailureDetector


def planned(text: str = "x float32[8]") -> tuple[Control, Control]:
    """Two ranks that have planned their first call together."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    ranks = [Control(rank, 2, 30.0, store) for rank in range(2)]
    for control in ranks:
        control.calls += 1
    other = threading.Thread(None, ranks[1].plan, "plans", (text,))
    other.start()
    assert ranks[0].plan(text) == [text, text]
    other.join()
    return ranks[0], ranks[1]


def test_a_rank_that_planned_an_earlier_call_is_not_apart() -> None:
    first, second = planned()
    assert first.read(1).kind == "plans"  # it has written nothing since
    for control in (first, second):
        control.calls += 1
    first.idle(1, None, time.monotonic())  # such as for new values of weights


def test_a_rank_that_plans_a_call_which_another_runs_is() -> None:
    first, second = planned()
    for control in (first, second):
        control.calls += 1
    second.plans += 1
    second.write("plans", None, "x float32[4]")
    with pytest.raises(PlanError, match=r"rank 1 plans call 2 anew, for x float32\[4"):
        first.idle(1, None, time.monotonic())


@pytest.mark.slow
@pytest.mark.parametrize("seen", [1, None])
def test_a_rank_that_broke_its_connections_for_another_is_not_blamed(
    seen: int | None,
) -> None:
    """Rank 2 has lost rank 0 and rank 1, which lost rank 0 too."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    _, first, second = (Control(rank, 3, 30.0, store) for rank in range(3))
    first.write("lost", None, "has lost a rank", None, 1)
    assert "rank 2 lost rank 0 at the start of a backend" in str(second.lost(seen))


def test_one_that_closes_after_a_failure_has_said_why() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    _, first, second = (Control(rank, 3, 30.0, store) for rank in range(3))
    second.fail(ConnectionError("rank 2 lost rank 0 at call 4"))
    second.close()
    assert str(first.lost(None)) == "rank 2 lost rank 0 at call 4"


def test_a_rank_that_has_ended_its_script_is_named_at_once() -> None:
    first, second = planned()
    second.end(" with ValueError: no data")
    first.calls += 1
    text = "rank 1 ended its script with ValueError: no data after call 1, and rank 0 "
    with pytest.raises(ConnectionError, match=f"{text}waits for it at call 2; every"):
        first.idle(1, None, time.monotonic())
    assert text in str(first.lost(1))


@pytest.mark.slow
def test_ranks_that_may_be_lost_are_all_named() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    controls = [Control(rank, 3, 4.0, store) for rank in range(3)]
    assert "rank 1 lost rank 0 or rank 2 at" in str(controls[1].lost(None))
    assert "rank 1 lost rank 2 at the start" in str(controls[1].lost(2))


def waiting(rank: int, whom: int, beat: int) -> Status:
    text = f"waits for rank {whom} at call 3"
    return Status("waits", Mark(3, 1), 1, text, whom, beat)


def test_who_waits_for_whom_ends_at_the_rank_that_is_silent() -> None:
    silence = FailureDetector()
    busy = Status("waits", Mark(2, 1), 1, "waits for rank 0 at call 2", 0)
    silence.note({0: waiting(0, 1, 4), 1: waiting(1, 2, 4), 2: busy})
    assert silence.chain(0) == [
        "rank 0 waits for rank 1 at call 3",
        "rank 1 waits for rank 2 at call 3",
        "rank 2 waits for nobody: it is frozen, cut off from the others, or busy",
    ]
    assert silence.chain(None) == silence.chain(2)
    silence.note({2: waiting(2, 0, 1)})
    assert silence.chain(0)[-1] == "they wait for each other"
    silence.note({3: Status("here", Mark(2, 1), 1, "")})  # what each waits for too
    assert silence.chain(0)[-1] == (
        "rank 3 waits for nobody: it is frozen, cut off from the others, or busy"
    )


def test_a_rank_that_wrote_long_ago_waits_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silence = FailureDetector()
    silence.note({0: waiting(0, 1, 4), 1: waiting(1, 0, 4)})
    now = time.monotonic() + LATE
    monkeypatch.setattr(time, "monotonic", lambda: now)
    silence.note({0: waiting(0, 1, 10), 1: waiting(1, 0, 4)})
    assert "rank 1 waits for nobody" in silence.chain(0)[-1]


class Frozen:
    """A store whose process is stopped."""

    def __init__(self) -> None:
        self.thawed = threading.Event()

    def check(self, keys: list[str]) -> bool:
        return self.thawed.wait()

    def get(self, key: str) -> bytes:
        return bytes(self.thawed.wait())

    def set(self, key: str, value: str) -> None:
        self.thawed.wait()


def test_a_store_that_does_not_answer_is_given_up() -> None:
    store = Frozen()
    board = Board(store, 0.1)
    for _ in range(2):  # the second time at once
        with pytest.raises(TimeoutError, match=r"store .* not answered for 0\.1\d* s"):
            board.check(["rank 0"])
    store.thawed.set()


def test_a_wait_without_an_answer_says_whom_it_is_for_and_ends_in_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    control, store = planned()[0], Frozen()
    assert control.board is not None
    control.board.store, control.limit, control.patience = store, 1.0, 0.5
    began = time.monotonic()
    at = "s for rank 1 at call 1, job 1F0"
    says = rf"^rank 0 waited 1[.\d]* {at}; the store of "  # later on a busy machine
    with pytest.raises(TimeoutError, match=says):
        control.idle(1, Mark(1, 1), began, "job 1F0")
    assert f"fxsched: rank 0 waits 1 {at}\n" in capsys.readouterr().err
    store.thawed.set()
