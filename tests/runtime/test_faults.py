"""Ranks that depart from each other: an error on every rank, and no hang."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, schedules
from fxsched.runtime.autograd_call import UNREAD
from tests.ranks_faults import Words
from tests.started_ranks import run_ranks


@pytest.fixture(scope="module")
def said() -> dict[tuple[int, str], str]:
    """What each rank of tests/ranks_faults.py says of each case."""
    done = run_ranks(2, "tests.ranks_faults")
    assert "fxsched: rank 1 waits 1 s for rank 0 at call 14, job 1F0" in done.stderr
    lines = re.split(r"^rank (\d): ([^:\n]*): ", done.stdout, flags=re.MULTILINE)
    return {
        (int(rank), case): text
        for rank, case, text in zip(lines[1::3], lines[2::3], lines[3::3], strict=True)
    }


Said = dict[tuple[int, str], str]


BOTH = ("distributed static", "gloo static")
ALONE = "rank {} plans call {} anew, for ids int64\\[{}, 3\\], with"
CASES: dict[str, tuple[str, ...]] = {  # on rank 0 and on rank 1, or on both
    "exception": (
        "IndexError: index out of range in self",
        r"ConnectionError: rank 0 failed at call 2: IndexError: index out of range.*\n"
        r"  in job 0F\d \(forward of stage 0, microbatch \d\) on worker 0, .* embed\n"
        r"  at .*/ranks_faults.py:\d+, in forward: .*self.embed\(",
    ),
    "refused": (
        r"rank 0 failed at call 4: IndexError(?s:.*)\n.*call backend.reset\(\) on",
    ),
    "shape": (
        "PlanError: " + ALONE.format(1, 5, 6) + " gradients, and rank 0 runs it",
    ),
    "evaluation": (
        "PlanError: " + ALONE.format(0, 7, 4) + "out gradients, and rank 1",
    ),
    "evaluation again": (
        r"PlanError: rank (0|1) runs call 10 as plan \d \(ids int64\[4, 3\], with.*, "
        r"rank (0|1) as plan \d \(ids",
    ),
    "skip": (
        r"PlanError: rank (0|1) runs call 18 with other inputs than rank (0|1) \(ids.*"
        "leave out no call",
    ),
    "autocast": (
        r"call 20 is for ids int64\[8, 3\], .*cpu autocast to torch.bfloat16 on rank 1",
    ),
    "all": ("equal to eager",),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize("case", CASES)
def test_what_one_rank_does_alone_ends_on_all(said: Said, way: str, case: str) -> None:
    for rank in (0, 1):
        text = CASES[case][rank % len(CASES[case])]
        assert re.search(text, said[rank, f"{way} {case}"])


@pytest.mark.slow
@pytest.mark.parametrize("way", BOTH)
def test_a_call_that_others_do_not_make_ends_in_time(said: Said, way: str) -> None:
    text = r"TimeoutError: rank 1 waited 2.* s for rank 0 at call 14, job 1F0; rank 0"
    assert re.search(text, said[1, f"{way} extra"])


@pytest.mark.slow
def test_a_rank_that_closes_ends_those_that_call(said: Said) -> None:
    assert "rank 0 has closed its backend after call 22" in said[1, "closed"]
    assert said[0, "left"].strip() == said[1, "left"].strip() == "[]"


@pytest.mark.slow
def test_a_closed_backend_leaves_no_descriptors_and_threads(said: Said) -> None:
    assert said[0, "more"].strip() == said[1, "more"].strip() == "False"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["distributed dynamic", "gloo dynamic"])
@pytest.mark.parametrize("case", ["exception", "refused"])
def test_a_failure_ends_ranks_in_dynamic_order(said: Said, way: str, case: str) -> None:
    test_what_one_rank_does_alone_ends_on_all(said, way, case)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("relu", r"rank 0: .*tanh\(.*self.between.*\n *rank 1: .*relu\(.*ranks_faults"),
        ("reduction", r"rank 0: .*'mean'\n *rank 1: .*'sum'"),
        ("passes", r"rank 1 has passes=\[.*<lambda>.*rank 0 has \[\]"),
    ],
)
def test_other_arithmetic_is_an_error(
    said: Said, rank: int, case: str, text: str
) -> None:
    assert re.search(text, said[rank, case]), said[rank, case]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "case", "text"),
    [
        (0, "save and call", r"rank . waits for .* at save.*; every rank makes"),
        (1, "save and call", r"rank . waits for .* ranks? ?\d? at call 2"),
        (0, "save and state", "rank 0 is at save, rank 1 at full_state_dict; every"),
        (1, "save and state", "rank 1 is at full_state_dict, rank 0 at save; every"),
        (0, "ended save", "True rank 1 ended its script after call 2, and .* at save;"),
        (0, "ended call", "True rank 1 ended its script after call 2, and .* call 3;"),
    ],
)
def test_ranks_in_calls_of_two_kinds_say_which(
    said: Said, rank: int, case: str, text: str
) -> None:
    assert re.search(text, said[rank, case])


@pytest.mark.parametrize("timeout", [0, -1.0, "10", True])
def test_a_timeout_is_seconds(timeout: object) -> None:
    with pytest.raises(PlanError, match=r"backend\(timeout=.*give seconds, above 0"):
        fxsched.backend(schedules.gpipe(2, 2), timeout=timeout)


def test_threads_go_on_after_a_failure() -> None:
    model = Words()
    backend = fxsched.backend(schedules.gpipe(2, 2), ["head"])
    run = torch.compile(model, backend=backend)
    ids = torch.arange(12).view(4, 3)
    with pytest.raises(IndexError, match="index out of range"):
        run(ids + 90)
    torch.testing.assert_close(run(ids), model(ids))
    backend.reset()  # which threads don't need
    torch.testing.assert_close(run(ids), model(ids))


class Mean(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean()


def test_gradients_that_nobody_takes_are_warned_of_once() -> None:
    x, model = torch.randn(4, 3), Mean(3, 1)
    with fxsched.compile(model, schedules.gpipe(1, 2)) as run:
        for _ in range(UNREAD - 1):
            run(x)
        with pytest.warns(UserWarning, match="16 calls of the model without"):
            run(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(x)
            run(x).backward()
            for _ in range(UNREAD - 1):
                run(x)
