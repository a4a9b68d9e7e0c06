"""A job, its direction and where it is placed."""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple


class PlanError(Exception):
    """Something the user asked for that cannot be planned; the message says what."""


class Direction(Enum):
    """Forward, backward, weight gradients, or update; `value` is the letter that jobs
    print with. Where a schedule splits the backward, B makes the gradients of a stage's
    inputs and W those of its weights; else B makes both and there is no W. U is a step
    of the optimizer, with the gradients since the last one.

    Its letter is equal to it, in `d == "B"`, `d in ("B", "W")` and as a key. Any other
    text raises PlanError there, where it would be unequal in silence.
    """

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"
    UPDATE = "U"

    def __str__(self) -> str:
        return self.value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, str):
            return self is other
        if other not in ("F", "B", "W", "U"):
            raise PlanError(
                f"a direction is compared with {other!r}; compare it with 'F', 'B', "
                "'W' or 'U', or with Direction.FORWARD, BACKWARD, WEIGHT or UPDATE"
            )
        return bool(self._value_ == other)

    def __hash__(self) -> int:
        return hash(self._value_)


class Job(NamedTuple):
    """The work of one stage on one microbatch in one direction; prints as `2F0`."""

    stage: int
    microbatch: int
    direction: Direction

    def __str__(self) -> str:
        return f"{self.stage}{self.direction.value}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Job:
        """The job that prints as `text`.

        Raises PlanError if the text isn't a stage, F, B, W or U, and a microbatch.
        """
        match = re.fullmatch(r"(\d+)([FBWU])(\d+)", text)
        if match is None:
            raise PlanError(
                f"{text!r} is not a job: write stage, F, B, W or U, microbatch, as in "
                "2F0"
            )
        stage, letter, microbatch = match.groups()
        return Job(int(stage), int(microbatch), Direction(letter))


class Placement(NamedTuple):
    """The worker that keeps the weights of a job and the worker that runs it."""

    weights: int
    compute: int
