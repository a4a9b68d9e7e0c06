"""How the values of a model depend on the rows of its batch.

A value either does not depend on the batch, or keeps its rows apart along one
dimension, or has them added up, or mixes them. Rules for operations (rule_table.py
and the files of rules) say what comes of what; tracker.py follows a model through
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor

from ..ir.graphs import name_of


class Kind(Enum):
    """What became of the rows."""

    SHARED = "shared"  # the same whatever the batch is, along every dimension
    APART = "apart"  # a part of the value for each row
    SUM = "sum"  # the whole batch's is the sum of its microbatches'
    MEAN = "mean"  # ... is their mean
    OTHER = "other"  # ... is neither
    OWN = "own"  # each row belongs to one shard, as values say: sharding/own_rows.py
    UNKNOWN = "unknown"  # there is no rule for an operation on the way


class Effect(Enum):
    """Why the microbatches of a value do not make up the whole batch's."""

    STATISTICS = "statistics of the whole batch"
    PAIRS = "every row of the batch meets every other"
    RATIO = "a weighted mean: one reduction over the batch divided by another"
    REDUCTION = "a reduction over the batch that is neither a sum nor a mean"
    ORDER = "rows of the batch are picked or ordered by their number"
    PICKED = "as many rows of the batch as values say are picked"
    FUNCTION = "a function, not linear, of a sum or mean over the batch"
    CONSTANT = "what does not depend on the batch is added to a sum over it"
    BOTH = "a sum over the batch is added to a mean over it"
    MIX = "rows of the batch are mixed"
    UNSURE = "there is no rule for an operation, which may mix rows"
    BACKWARD = "gradients of rows meet in a backward of the model's own"


class Cause(NamedTuple):
    """The first operation that mixed rows: its name, and the user's lines."""

    effect: Effect
    operation: str
    stack: str | None = None


class Rows(NamedTuple):
    """How one tensor depends on the batch.

    dim, outer: if APART, that dimension is outer x rows x something.
    numbers: whether its values are the numbers of the rows, as of torch.arange(batch).
    cause: what mixed rows on the way, if anything did.
    owner: if OWN, what says whose each is.
    """

    kind: Kind
    dim: int = 0
    outer: int = 1
    numbers: bool = False
    cause: Cause | None = None
    owner: object = None

    @property
    def reduced(self) -> bool:
        """Whether rows were added up, or reduced in another way."""
        return self.kind in (Kind.SUM, Kind.MEAN, Kind.OTHER)

    @property
    def place(self) -> tuple[int, int]:
        """Where the rows are, to compare with another value's."""
        return self.dim, self.outer


SHARED = Rows(Kind.SHARED)
UNKNOWN = Rows(Kind.UNKNOWN)


def meet(rows: Rows | None) -> bool:
    """Whether rows of the batch met, or may have, so that microbatches' values need
    not make up the whole batch's."""
    return rows is not None and rows.cause is not None


class OpCall(NamedTuple):
    """One operation: its arguments and result (fake tensors), and their rows.

    size: rows of the batch that the tensors have.
    whole: whether what has no rows is as long as all rows, and is read in parts.
    """

    func: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    out: Any
    of: Callable[[Tensor], Rows]
    size: int
    stack: str | None
    whole: bool = False

    @property
    def name(self) -> str:
        """An aten operation's name, in place or not."""
        return name_of(self.func).rstrip("_")

    def get(self, name: str, default: Any = None) -> Any:
        """The argument that the operation's schema calls so."""
        if name in self.kwargs:
            return self.kwargs[name]
        for i, argument in enumerate(self.func._schema.arguments):
            if argument.name == name:
                if i < len(self.args):
                    return self.args[i]
                value = argument.default_value
                return default if value is None else value
        return default

    def tensors(self) -> Iterator[Tensor]:
        """The tensors among the arguments, also in lists."""
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, (tuple, list)):
                yield from (each for each in value if isinstance(each, Tensor))

    def mixed(self, effect: Effect, *before: Rows) -> Cause:
        """The first cause among values, or this operation as one.

        Rows that are put in order and back, around an operation that has no rule, as
        mixtures of experts do, are not known to be mixed.
        """
        cause = first_cause(before)
        unsure = cause is not None and cause.effect is Effect.UNSURE
        if cause is None or (unsure and effect is not Effect.ORDER):
            return Cause(effect, str(self.func), self.stack)
        return cause

    def inner(self, tensor: Tensor, rows: Rows) -> int:
        """How many neighbours along its dimension belong to one row."""
        return max(int(tensor.shape[rows.dim]) // (rows.outer * self.size), 1)


Rule = Callable[[OpCall], Rows | Sequence[Rows]]


def first_cause(values: Sequence[Rows]) -> Cause | None:
    """The first that is given, if none is unsure."""
    causes = [rows.cause for rows in values if rows.cause]
    unsure = [cause for cause in causes if cause.effect is Effect.UNSURE]
    return next(iter(unsure or causes), None)


def where_known(rule: Rule) -> Rule:
    """A rule that is asked only where all arguments are known, some not shared."""

    def guarded(call: OpCall) -> Rows | Sequence[Rows]:
        values = [call.of(tensor) for tensor in call.tensors()]
        if any(rows.kind is Kind.UNKNOWN for rows in values):
            return UNKNOWN._replace(cause=first_cause(values))
        if all(rows.kind is Kind.SHARED for rows in values):
            return SHARED
        return rule(call)

    return guarded
