"""The stages of a model, where those of the program are pieces of their shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import networkx as nx

from ..jobs.job import Piece, whole_stage
from .tables import wrapped

MEET = "* global-batch stages, in which rows of all microbatches meet, as in BatchNorm"
ADDED = ("forward", "backward", "weight", "update", "held", "weights", "fetch", "flops")


def whole_stages(stages: nx.DiGraph[int]) -> nx.DiGraph[int]:
    """The stages with their pieces added up, each in `pieces`; what its shards send
    each other is the edge of a stage to itself. A shard gets a value once, however many
    of its pieces read it. Without pieces, the stages as they are."""
    if not any(isinstance(s, Piece) for s in stages):
        return stages
    whole: nx.DiGraph[int] = nx.DiGraph()
    for piece in map(_piece, sorted(stages)):
        data = stages.nodes[piece]
        if piece.stage not in whole:
            whole.add_node(piece.stage, modules=[], parameters=0, pieces=[])
        total = whole.nodes[piece.stage]
        total["pieces"].append(piece)
        total["modules"] = _modules([*total["modules"], *data["modules"]])
        total["parameters"] += data["parameters"]
        for key in ADDED:
            total[key] = total.get(key, 0) + data.get(key, 0)
    sent: dict[tuple[int, int], dict[tuple[str, int], int]] = {}
    for maker, reader, data in stages.edges(data=True):
        a, b = _piece(maker), _piece(reader)
        if (a.stage, a.shard) != (b.stage, b.shard):
            values = sent.setdefault((a.stage, b.stage), {})
            values.update({(name, b.shard): n for name, n in data["values"].items()})
    for (one, other), values in sent.items():
        whole.add_edge(one, other, bytes=sum(values.values()))
    return whole


def _piece(stage: int) -> Piece:
    assert isinstance(stage, Piece), "all stages are pieces, or none is"
    return stage


def _modules(names: Iterable[str]) -> list[str]:
    """Each module once, the outermost of those that are inside each other."""
    plain = list(dict.fromkeys(name.removesuffix(" (part)") for name in names))
    return [
        name
        for name in plain
        if not any(name.startswith(f"{other}.") for other in plain)
    ]


def stage_count(stages: nx.DiGraph[int]) -> str:
    """How many stages of the model there are, as in tables: 2, or 2 + 1* if one more is
    joint."""
    joint = {whole_stage(s) for s, joint in stages.nodes(data="joint") if joint}
    others = set(map(whole_stage, stages)) - joint
    counts = (f"{len(others) or ''}", f"{len(joint)}*" * bool(joint))
    return " + ".join(filter(None, counts))


def meet_notes(rows: Iterable[Sequence[str]], width: int) -> list[str]:
    """The note below a table that has * in its second column, in lines of `width`."""
    return [wrapped([MEET], width)] * any("*" in row[1] for row in rows)


def shard_text(stage: int) -> str:
    """A stage, and of pieces which shard."""
    return f"{stage.stage}.{stage.shard}" if isinstance(stage, Piece) else str(stage)
