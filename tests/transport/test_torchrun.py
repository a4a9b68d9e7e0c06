"""The same over torch.distributed: 2 gloo processes of torchrun, and 4 forked ones."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.ranks import CASES, EVERY_RANK
from tests.started_ranks import run_ranks
from tests.torchrun import torchrun


@cache
def printed(processes: int) -> str:
    """What the ranks print, of all cases for so many."""
    start = torchrun if processes == 2 else run_ranks
    return start(processes, "tests.ranks", *CASES[processes]).stdout


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_ranks_equal_eager(processes: int) -> None:
    cases = len(EVERY_RANK[processes]())
    assert printed(processes).count("equal to eager") == cases * processes


@pytest.mark.slow
def test_ranks_keep_one_model_between_them() -> None:
    assert "one model between 4 ranks" in printed(4)


@pytest.mark.slow
def test_ranks_hold_weights_of_few_jobs() -> None:
    assert printed(2).count("no more weights than asked for") == 2


@pytest.mark.slow
def test_owners_start_from_the_first_and_end_with_the_same_bits() -> None:
    assert "same bits on 2 ranks" in printed(2)


@pytest.mark.slow
def test_backward_after_the_call_evaluation_and_new_shapes() -> None:
    assert printed(2).count("contract holds") == 2, printed(2)
    for text, ranks in (
        ("has no send", (0, 1)),
        ("PlanError: rank 1 could not write its program: ZeroDivisionError", (0,)),
        ("ZeroDivisionError: of rank 1", (1,)),
        ("rank 1 planned other programs than rank 0", (0, 1)),
    ):
        for rank in ranks:
            assert re.search(f"rank {rank}: .*{text}", printed(2)), text


@pytest.mark.slow
def test_ranks_plan_by_what_rank_0_measured_and_get_its_errors() -> None:
    assert printed(2).count("the batch size is fixed to 8") == 2
    assert printed(2).count("Twofold: onetwo") == 2


@pytest.mark.slow
def test_a_world_of_another_size_is_an_error_on_every_rank() -> None:
    assert printed(2).count("the schedule has 4 workers, but torch.distr") == 2


@pytest.mark.slow
def test_a_rank_frees_a_buffer_once_its_peer_has_it() -> None:
    torchrun(2, "tests.ranks_sent")


def test_ranks_add_up_pieces_of_sums() -> None:
    torchrun(4, "tests.ranks_sums")
