"""Stages cut into shards: what a schedule says of each of their pieces.

Shard p of stage s is one worker's part of it. Where the shards of a stage add up what
they have, each is cut into pieces there. A piece is a stage of the program; to w, n
and the tables it is stage s, shard p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .answers import Cap
from .job import Direction, Piece
from .own_caps import OwnCaps
from .per_shard import takes_shard
from .schedule import Schedule


def in_pieces(schedule: Schedule, pieces: Sequence[Piece]) -> Schedule:
    """What a schedule says of the stages' shards, for stages that are their pieces.

    Of one shard's job, forward pieces come in their order and backward ones in the
    other, without another job in between by n alone.
    """
    most = 1 + max(piece.number for piece in pieces)
    ranked, caps = _of_pieces("n", schedule.n, pieces), schedule.in_flight
    assert ranked is not None, "every schedule has n"

    def n(s: int, b: int, d: Direction) -> int:
        number = pieces[s].number
        place = number if d is Direction.FORWARD else most - 1 - number
        return most * int(ranked(s, b, d)) + place

    return replace(
        schedule,
        shards=1,
        stages=len(pieces),
        fit=None,
        w=_of_pieces("w", schedule.w, pieces),
        n=n,
        u=_of_pieces("u", schedule.u, pieces),
        version=_of_pieces("version", schedule.version, pieces),
        rate=_of_stages(schedule.rate, pieces),
        drift=_of_stages(schedule.drift, pieces),
        in_flight=_capped(caps, pieces) if callable(caps) else caps,
    )


def _of_pieces(
    name: str, function: Callable[..., Any] | None, pieces: Sequence[Piece]
) -> Any:
    if function is None or not takes_shard(name, function):
        return _of_stages(function, pieces)
    return lambda s, *more: function(pieces[s].stage, *more, pieces[s].shard)


def _capped(caps: Cap, pieces: Sequence[Piece]) -> Cap:
    """Caps of pieces; a schedule's own stay that."""
    if isinstance(caps, OwnCaps):
        return replace(caps, cap=_of_stages(caps.cap, pieces))
    capped: Cap = _of_stages(caps, pieces)
    return capped


def _of_stages(function: Callable[..., Any] | None, pieces: Sequence[Piece]) -> Any:
    return function and (lambda s, *more: function(pieces[s].stage, *more))
