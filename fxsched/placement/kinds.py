"""How the values of a model depend on the rows of its batch.

The words are those of torch.distributed.tensor: a value is replicated, where it does
not depend on the batch, sharded, where it keeps rows apart along one dimension, or
partial, where they are added up; or rows are mixed. Rules for operations (rule_table.py
and the files of rules) say what comes of what; tracker.py follows a model through them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor

from ..ir.graphs import name_of, named_arguments, tensors


class Kind(Enum):
    """What became of the rows."""

    REPLICATE = "replicate"  # the same whatever the batch is, along every dimension
    SHARD = "shard"  # a part of the value for each row
    SUM = "partial sum"  # the whole batch's is the sum of its microbatches'
    MEAN = "partial avg"  # ... is their mean
    OTHER = "other"  # ... is neither
    OWN = "own"  # each row belongs to one shard, as values say: placement/own_rows.py
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

    dim, outer: if SHARD, that dimension is outer x rows x something.
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
    def sharded(self) -> bool:
        """Whether there is a part of the value for each row."""
        return self.kind is Kind.SHARD

    @property
    def plain(self) -> bool:
        """Whether no rows met on the way to it, and their numbers are no values."""
        return self.cause is None and not self.numbers

    @property
    def reduced(self) -> bool:
        """Whether rows were added up, or reduced in another way."""
        return self.kind in (Kind.SUM, Kind.MEAN, Kind.OTHER)

    @property
    def of_gradient(self) -> Rows:
        """The rows of a value's gradient: a part's is a part, that of what all read
        adds up."""
        return self._replace(kind=GRADIENTS.get(self.kind, self.kind))

    @property
    def place(self) -> tuple[int, int]:
        """Where the rows are, to compare with another value's."""
        return self.dim, self.outer

    def without(self, dims: Container[int]) -> Rows:
        """The same of a value that lacks these dimensions, none of which has rows."""
        return self._replace(dim=sum(d not in dims for d in range(self.dim)))


GRADIENTS = {
    Kind.REPLICATE: Kind.SUM,
    Kind.SUM: Kind.REPLICATE,
    Kind.MEAN: Kind.REPLICATE,
}
REPLICATE = Rows(Kind.REPLICATE)
UNKNOWN = Rows(Kind.UNKNOWN)


def meet(rows: Rows | None) -> bool:
    """Whether rows of the batch met, or may have, so that microbatches' values need
    not make up the whole batch's."""
    return rows is not None and rows.cause is not None


Placed = tuple[Any, Rows]  # an argument, or a result, and what rows it should have


class OpCall(NamedTuple):
    """One operation: its arguments and result (fake tensors), and their rows.

    size: rows of the batch that the tensors have.
    whole: whether what has no rows is as long as all rows, and is read in parts.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    of: Callable[[Tensor], Rows]
    size: int
    stack: str | None
    whole: bool = False

    @property
    def name(self) -> str:
        """An aten operation's name, in place or not."""
        return name_of(self.target).rstrip("_")

    @property
    def values(self) -> list[Rows]:
        """The rows of the tensors among the arguments."""
        return [self.of(tensor) for tensor in self.tensors()]

    def get(self, name: str, default: Any = None) -> Any:
        """The argument that the operation's schema calls so."""
        value = named_arguments(self).get(name)
        return default if value is None else value

    def dim(self, tensor: Tensor, name: str = "dim", default: int = 0) -> int:
        """The dimension of a tensor that an argument tells, counted from the first."""
        return int(self.get(name, default)) % max(tensor.dim(), 1)

    def dims(self, tensor: Tensor) -> set[int]:
        """The dimensions of a tensor that it works along: all where it says none."""
        dims = self.get("dim", self.get("dims"))
        dims = [dims] if isinstance(dims, int) else dims or range(tensor.dim())
        return {d % tensor.dim() for d in dims if tensor.dim()}

    def tensors(self) -> Iterator[Tensor]:
        """The tensors among the arguments, also in lists."""
        return tensors((*self.args, *self.kwargs.values()))

    def others(self, read: Sequence[Tensor]) -> list[Tensor]:
        """The tensors among the arguments but these."""
        return [t for t in self.tensors() if all(t is not each for each in read)]

    def aligned(self, tensors: Iterable[Tensor], count: int) -> list[Rows]:
        """The rows of tensors that are broadcast to as many dimensions."""
        values = ((self.of(tensor), tensor.dim()) for tensor in tensors)
        return [
            rows._replace(dim=rows.dim + count - own) if rows.sharded else rows
            for rows, own in values
        ]

    def kept(self, rows: Rows, effect: Effect | None) -> Rows:
        """Rows that stay where they are, with what this operation does to them, if it
        does and wasn't said yet."""
        cause = Cause(effect, str(self.target), self.stack) if effect else None
        return rows._replace(cause=rows.cause or cause)

    def other(self, effect: Effect) -> Rows:
        """Those of a value that microbatches' do not make up."""
        return self.kept(Rows(Kind.OTHER), effect)

    def fit(self, placed: Iterable[Placed]) -> bool:
        """Whether arguments have these rows, or are the same for all of them."""
        return all(self._fits(*each) for each in placed)

    def _fits(self, value: object, wanted: Rows) -> bool:
        if not isinstance(value, Tensor):
            return self.whole  # numbers may be of the batch's size
        rows = self.of(value)
        if rows == REPLICATE and wanted.sharded:
            return self.whole or value.shape[wanted.dim] == 1
        return rows._replace(cause=None) == wanted

    def inner(self, tensor: Tensor, rows: Rows) -> int:
        """How many neighbours along its dimension belong to one row."""
        return max(int(tensor.shape[rows.dim]) // (rows.outer * self.size), 1)


Rule = Callable[[OpCall], Rows | Sequence[Rows]]


def first_cause(values: Sequence[Rows]) -> Cause | None:
    """The first that is given, if none is unsure."""
    causes = [rows.cause for rows in values if rows.cause]
    unsure = [cause for cause in causes if cause.effect is Effect.UNSURE]
    return next(iter(unsure or causes), None)


def followed(rule: Rule, counted: slice = slice(None)) -> Rule:
    """A rule that is asked only where all arguments are known, some not shared; what
    mixed their rows before is no matter of the rule, and stays.

    counted: the arguments of which that counts.
    """

    def guarded(call: OpCall) -> Rows | Sequence[Rows]:
        values, before = call.values, first_cause(call.values[counted])
        if any(rows.kind is Kind.UNKNOWN for rows in values):
            return UNKNOWN._replace(cause=first_cause(values))
        if all(rows.kind is Kind.REPLICATE for rows in values):
            return REPLICATE
        made = rule(call._replace(of=lambda each: call.of(each)._replace(cause=None)))
        if isinstance(made, Rows):
            return _after(before, made)
        return [_after(before, rows) for rows in made]

    return guarded


def _after(before: Cause | None, rows: Rows) -> Rows:
    """Rows with the first cause: that of before, or their own.

    Rows that are put in order and back, around an operation that has no rule, as
    mixtures of experts do, are not known to be mixed.
    """
    if before is None or rows.kind is Kind.REPLICATE:
        return rows
    unsure = before.effect is Effect.UNSURE
    if unsure and rows.cause and rows.cause.effect is not Effect.ORDER:
        return rows
    return rows._replace(cause=before)
