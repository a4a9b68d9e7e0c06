"""Rules for channels that are cut, which rows of a batch never are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..rows.kinds import SHARED, Kind, Rows
from ..rows.tracker import Tracker

aten = torch.ops.aten
Layouts = Sequence[Rows]


def channel_layout(func: Any, args: Sequence[Any], tracker: Tracker) -> Layouts | None:
    """The layouts of what an operation on channels gives; None for others, and for
    what isn't cut along channels."""
    if func is aten.convolution.default:
        return _convolution(args, tracker)
    if func is aten.native_group_norm.default:
        return _group_norm(args, tracker)
    return None


def _convolution(args: Sequence[Any], tracker: Tracker) -> Layouts | None:
    """Of [batch, channels, ..], with weights [out, in, ..], or the other way round if
    transposed: parts of `out` stay apart, those of `in` are added up."""
    transposed, groups = args[6], args[8]
    x, weight = tracker.of(args[0]), tracker.of(args[1])
    bias = SHARED if args[2] is None else tracker.of(args[2])
    if groups != 1 or {x.kind, weight.kind} - {Kind.SHARED, Kind.APART}:
        return None
    after, before = (1, 0) if transposed else (0, 1)
    beside = bias in (SHARED, weight._replace(dim=0))
    if x == SHARED and weight.kind is Kind.APART and weight.dim == after and beside:
        return [weight._replace(dim=1)]
    cut = {rows.outer for rows in (x, weight) if rows.kind is Kind.APART}
    inner = (x == SHARED or x.dim == 1) and (weight == SHARED or weight.dim == before)
    if inner and len(cut) == 1 and args[2] is None:
        return [Rows(Kind.SUM)]
    return None


def _group_norm(args: Sequence[Any], tracker: Tracker) -> Layouts | None:
    """Whole groups of channels stay apart."""
    x, groups = tracker.of(args[0]), args[6]
    numbers = [SHARED if each is None else tracker.of(each) for each in args[1:3]]
    if x.kind is not Kind.APART or x.dim != 1 or x.outer != 1 or groups % tracker.size:
        return None
    if any(rows not in (SHARED, x._replace(dim=0)) for rows in numbers):
        return None
    return [x, x, x]
