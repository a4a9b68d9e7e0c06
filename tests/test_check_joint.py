"""The verifier finds rows of a microbatch where another's belong."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from fxsched import Job
from fxsched.checker.check_joint import JointUse, Rows, joint_fault


def reads(microbatches: Sequence[int], first: int = 0) -> list[JointUse]:
    """What 2F* reads, place by place, of which microbatch."""
    job = Job.parse("2F*")
    return [
        JointUse(0, job, (1, first + i), f"v{i}", Rows(frozenset({b}), frozenset(), ()))
        for i, b in enumerate(microbatches)
    ]


def gives(*results: int, place: int = 0, stage: int = 3) -> list[JointUse]:
    """The results of 2F* that each microbatch of a stage reads at a place."""
    part = Job.parse("2F*")
    return [
        JointUse(
            1,
            Job.parse(f"{stage}F{b}"),
            (1, place),
            f"u{b}",
            Rows(frozenset(), frozenset({(part, result)}), ()),
        )
        for b, result in enumerate(results)
    ]


def test_runs_of_all_microbatches_in_order_are_sound() -> None:
    assert joint_fault(reads([0, 1, 2, 0, 1, 2]), 3) is None
    assert joint_fault(reads([0, 1, 2]) + reads([0, 1, 2], first=5), 3) is None
    both = gives(0, 1, 2) + gives(3, 4, 5, place=1) + gives(0, 1, 2, stage=4)
    assert joint_fault(both, 3) is None
    assert joint_fault(gives(0, 1, 2) + gives(3, 3, 3, place=1), 3) is None


FAULTS = {
    "swapped": (reads([0, 2, 1]), "2F. reads v1, of microbatch 2, where that of 1"),
    "twice": (reads([0, 1, 1]), "2F. reads v2, of microbatch 1, where that of 2"),
    "the first left out": (reads([1, 2, 0]), "reads v0, of microbatch 1, where that"),
    "the last left out": (reads([0, 1]), "2F. reads nothing of microbatch 2 after v1"),
    "apart": (reads([0]) + reads([1, 2], first=2), "where that of 1 belongs"),
    "rows of another": (gives(0, 2, 1), "results 0, 2, 1 of 2F., not the rows of each"),
    "the same twice": (gives(0, 0, 2), "results 0, 0, 2 of 2F."),
    "rows of one for all": (gives(0, 1, 2) + gives(1, 1, 1, place=1), "elsewhere"),
    "later by one": (gives(0, 1, 2) + gives(1, 2, 3, place=1), "elsewhere"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_rows_of_another_microbatch_are_a_fault(fault: str) -> None:
    uses, message = FAULTS[fault]
    found = joint_fault(uses, 3)
    assert found is not None and re.search(message, found), found
