"""What a step gives the user and leaves in the model, on two ranks."""

from __future__ import annotations

import pytest

from tests.started_ranks import run_ranks


@pytest.mark.slow
def test_what_two_ranks_give_and_leave() -> None:
    done = run_ranks(2, "tests.ranks_outputs")
    for topic in ("scalers hold", "state holds", "random numbers hold"):
        assert done.stdout.count(topic) == 2, done.stdout
