"""What a step gives the user and leaves in the model, on two ranks of torchrun."""

from __future__ import annotations

from tests.torchrun import torchrun


def test_what_two_ranks_give_and_leave() -> None:
    done = torchrun(2, "tests.ranks_outputs")
    for topic in ("scalers hold", "state holds", "random numbers hold"):
        assert done.stdout.count(topic) == 2, done.stdout
