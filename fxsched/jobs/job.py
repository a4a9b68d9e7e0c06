"""A job, its direction and where it is placed."""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

MISUSE = "fxsched misuse"  # marks errors of other types as PlanErrors are


class PlanError(Exception):
    """An error in what the user asked for; the message says what to change."""


class UnknownModule(PlanError):
    """An option names a module that the model doesn't call."""


class Direction(Enum):
    """Forward, backward, weight gradients, or update: F, B, W or U.

    `value` is the letter, with which jobs print. If a schedule splits the backward, B
    computes the gradients of a stage's inputs and W those of its weights. Otherwise B
    computes both, and there is no W. U is a step of the optimizer, with the gradients
    since the last step.

    A direction equals its letter: in `d == "B"`, in `d in ("B", "W")` and as a dict
    key. A comparison with any other text raises PlanError, where an ordinary enum would
    be unequal without an error.
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


class _AllRows(int):
    """Of a job that runs once, on the rows of all microbatches: 0 to w and tables,
    and prints as `*`."""

    def __str__(self) -> str:
        return "*"

    def __reduce__(self) -> str:
        return "ALL_ROWS"  # there is one, in all processes


ALL_ROWS = _AllRows(0)


class Piece(int):
    """A stage of a program that is a piece of one of the model's.

    stage, shard: of the model's stages. number: of the shard's pieces, from its first.
    """

    stage: int
    shard: int
    number: int

    def __new__(cls, value: int, stage: int, shard: int, number: int) -> Piece:
        piece = super().__new__(cls, value)
        piece.stage, piece.shard, piece.number = stage, shard, number
        return piece

    def __reduce__(self) -> tuple[type[Piece], tuple[int, int, int, int]]:
        return Piece, (int(self), self.stage, self.shard, self.number)


def whole_stage(stage: int) -> int:
    """The stage of the model that a stage of the program is, or is a piece of."""
    return stage.stage if isinstance(stage, Piece) else stage


class Job(NamedTuple):
    """The work of one stage on one microbatch in one direction; prints as `2F0`.

    A global-batch stage has one job in each direction, on all rows. The microbatch of
    such a job is ALL_ROWS, which equals 0, and the job prints as `2F*`. The job of a
    shard of a stage prints as `2F0.1`. Sums over shards divide this job; the part after
    sum 3 prints as `2F0.1/3`.
    """

    stage: int
    microbatch: int
    direction: Direction

    def __str__(self) -> str:
        stage, what = self.stage, f"{self.direction.value}{self.microbatch!s}"
        if not isinstance(stage, Piece):
            return f"{stage}{what}"
        name = f"{stage.stage}{what}.{stage.shard}"
        return f"{name}/{stage.number}" if stage.number else name

    @property
    def joint(self) -> bool:
        """Whether the job runs on the rows of all microbatches."""
        return isinstance(self.microbatch, _AllRows)

    @staticmethod
    def parse(text: str) -> Job:
        """The job that prints as `text`.

        Raises PlanError unless the text is a stage, one of F, B, W or U, and a
        microbatch, or `*` for all microbatches.
        """
        match = re.fullmatch(r"(\d+)(?:([FBWU])(\d+)|([FBW])\*)", text)
        if match is None:
            raise PlanError(
                f"{text!r} is not a job: write stage, F, B, W or U, microbatch, as in "
                "2F0"
            )
        stage, letter, microbatch, joint = match.groups()
        if joint:
            return Job(int(stage), ALL_ROWS, Direction(joint))
        return Job(int(stage), int(microbatch), Direction(letter))


ELSEWHERE = ("host", "disk")  # where activations wait that no worker holds


class Placement(NamedTuple):
    """The worker that keeps the weights of a job and the worker that runs it.

    saved: of F, where what B reads of it waits for B: None for the worker that runs B;
        another worker; "host" for pinned memory of the host, with a model on a device;
        or "disk" for a file of the run. Of other jobs it isn't read, nor of a
        global-batch stage, whose B comes right after its F.
    """

    weights: int
    compute: int
    saved: int | str | None = None
