"""What passes over a model's graph say of it, beside its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
from torch import fx

from ..jobs.compared import Compared
from ..jobs.job import Piece
from ..jobs.schedule import Schedule
from .graphs import Draw, Group, Output
from .parts import PartOf, WeightCut
from .writes import Write

FACTS = "facts"  # the key of gm.meta that has them


@dataclass(frozen=True)
class Facts:
    """The trace says the first six, planning `pairs` and `norms`; a pass that finds out
    more replaces the record.

    outputs: how each output of the model is put together.
    writes: what the model writes into, by position of the input.
    fake_mode: the mode that fake values live in.
    totals: what of the whole batch weighs the loss of microbatches, for people.
    meeting: where rows of the batch meet, if they do, for people.
    linear: whether all gradients are in proportion to the one that arrives.
    pairs: whether rows meet in pairs in a global-batch stage or not, and why, for
        people.
    norms: which batch BatchNorms are of, and what that costs, for people.
    schedule: the user's, fitted to the stages (assign_stages).
    stages: a networkx.DiGraph; see clock.stage_record (estimates by assign_stages; all
        of it by split_stages; times and `held` by differentiate_stages).
    groups: weights by owners and readers (split_stages; who gives gradients by
        differentiate_stages).
    compared: what the schedule and its cut were compared with, where it had candidates
        (assign_stages).
    again: which parts of the model B computes again, for people (assign_stages).
    loss: position of the output that B starts from in the call itself, or None
        (differentiate_stages).
    parking: bytes that go to the "host" and to "disk" in a second
        (differentiate_stages).
    pieces: the stages, where they are pieces of shards, and `parts` the parts of
        weights that they read, by their positions after the inputs of the call
        (shard_stages).
    cuts, sliced: what is said of weights that could be cut, and of what lies between
        sums; whole: the graph without shards, for what these save (shard_stages).
    """

    outputs: tuple[Output, ...]
    writes: Mapping[int, Write]
    fake_mode: Any
    totals: str = ""
    meeting: str = ""
    linear: bool = True
    schedule: Schedule | None = None
    compared: Compared | None = None
    again: str = ""
    pairs: str = ""
    norms: str = ""
    stages: nx.DiGraph[int] = field(default_factory=nx.DiGraph)
    groups: tuple[Group, ...] = ()
    loss: int | None = None
    parking: Mapping[str, float] = field(default_factory=dict)
    pieces: tuple[Piece, ...] = ()
    parts: Mapping[int, PartOf] = field(default_factory=dict)
    cuts: tuple[WeightCut, ...] = ()
    sliced: str = ""
    whole: fx.GraphModule | None = None


@dataclass(frozen=True)
class StageFacts:
    """What split_stages says of a stage's module.

    places: where each of its inputs that are state is: the group, of those that the
        stage reads, and the tensor in it.
    draws: its draws in the model; their numbers count from its first.
    measured: seconds of F and of B, if a profile gave them.
    """

    places: list[tuple[int, int]]
    draws: tuple[Draw, ...]
    measured: tuple[float, float] | None


def facts(gm: fx.GraphModule) -> Facts:
    """What is known of a graph that was traced."""
    known: Facts = gm.meta[FACTS]
    return known


def stage_facts(module: fx.GraphModule) -> StageFacts:
    """What is known of a stage's module."""
    known: StageFacts = module.meta[FACTS]
    return known
