"""Where a model and what was saved differ: errors that say in what."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from ..jobs.job import PlanError
from .content import MODEL
from .manifest import Saved

REMEDY = "load into a model like the one that was saved"


def check_alike(name: str, saved: Saved, tensor: Tensor) -> None:
    """Raises PlanError unless a tensor is of the shape and type that was saved."""
    mine = Saved.of(tensor, 0)
    if saved[1:] != mine[1:]:
        raise PlanError(
            f"load: {name.removeprefix(MODEL)} was saved as {saved}, and this model "
            f"has {mine}; {REMEDY}"
        )


def tied_here(name: str, first: str) -> PlanError:
    """What to raise for one tensor that was saved as two."""
    return PlanError(
        f"load: {name.removeprefix(MODEL)} and {first.removeprefix(MODEL)} are one "
        f"tensor in this model, and were saved as two; {REMEDY}"
    )


def check_names(what: str, here: Collection[str], saved: Collection[str]) -> None:
    """Raises PlanError unless a checkpoint has the names that are here."""
    missing = [name for name in here if name not in saved]
    left = [name for name in saved if name not in here]
    for names, text in (
        (missing, "the checkpoint has no {} {}, which is"),
        (left, "the checkpoint has a {} {}, which isn't"),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if names[1:] else ""
            raise PlanError(
                f"load: {text.format(what, names[0].removeprefix(MODEL))} in this "
                f"model{more}; {REMEDY}"
            )
