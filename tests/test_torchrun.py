"""The same over torch.distributed: torchrun with 2 and 4 gloo processes."""

from __future__ import annotations

import re

import pytest

from tests.ranks import EVERY_RANK
from tests.torchrun import torchrun


@pytest.mark.parametrize("processes", [2, 4])
def test_ranks_equal_eager(processes: int) -> None:
    done = torchrun(processes, "tests.ranks", "equal")
    cases = len(EVERY_RANK[processes]())
    assert done.stdout.count("equal to eager") == cases * processes, done.stdout


def test_ranks_keep_one_model_between_them() -> None:
    done = torchrun(4, "tests.ranks", "memory")
    assert "one model between 4 ranks" in done.stdout


def test_ranks_hold_weights_of_few_jobs() -> None:
    done = torchrun(2, "tests.ranks", "slots")
    assert done.stdout.count("no more weights than asked for") == 2


def test_owners_start_from_the_first_and_end_with_the_same_bits() -> None:
    done = torchrun(2, "tests.ranks", "replicas")
    assert "same bits on 2 ranks" in done.stdout


def test_backward_after_the_call_evaluation_and_new_shapes() -> None:
    done = torchrun(2, "tests.ranks", "contract")
    assert done.stdout.count("contract holds") == 2, done.stdout
    for text, ranks in (
        ("has no send", (0, 1)),
        ("PlanError: rank 1 could not write its program: ZeroDivisionError", (0,)),
        ("ZeroDivisionError: of rank 1", (1,)),
        ("rank 1 planned other programs than rank 0", (0, 1)),
    ):
        for rank in ranks:
            assert re.search(f"rank {rank}: .*{text}", done.stdout), (text, done.stdout)


def test_ranks_plan_by_what_rank_0_measured_and_get_its_errors() -> None:
    done = torchrun(2, "tests.ranks", "profiled")
    assert done.stdout.count("the batch size is fixed to 8") == 2, done.stdout
    assert done.stdout.count("Twofold: onetwo") == 2, done.stdout


def test_a_world_of_another_size_is_an_error_on_every_rank() -> None:
    done = torchrun(2, "tests.ranks", "world")
    assert done.stdout.count("the schedule has 4 workers, but torch.distr") == 2
