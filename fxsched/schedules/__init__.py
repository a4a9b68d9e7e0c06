"""The library of schedules: each is one formula for w, one for n, and its source.

In formulas, s is the stage, b the microbatch, d the direction, W the number of workers.
LIBRARY has the schedules by name. replicate makes any schedule data-parallel; sharded
makes any schedule tensor-parallel. The module also has functions n for your own
schedules, and reads schedules from files.

Imports: clock, jobs.
"""

from __future__ import annotations

from .auto import auto
from .by_name import Library
from .data_parallel import ddp, fsdp, hsdp, replicate, zero1, zero2
from .graph_schedule import graph
from .local_sgd import local_sgd
from .looped import fslpp, interleaved, looped_bfs, looped_dfs, lpp
from .orders import (
    forward_first,
    oldest_microbatch_first,
    oldest_stage_first,
    stage_first,
)
from .parked import parked
from .pipelines import cuckoo, folded, gpipe, naive, one_f_one_b, overflow
from .servers import (
    hybrid,
    parameter_server,
    sharded_groups,
    sharded_parameter_server,
)
from .stale import pipedream, pipedream_2bw, pipemare, stale_by_one
from .tensor_parallel import sharded
from .trunk import bubble_filled, nested
from .zero_bubble import v_half, v_min, zb_h1, zb_h2, zb_v

LIBRARY = Library(
    {
        "ddp": ddp,
        "fsdp": fsdp,
        "hsdp": hsdp,
        "zero1": zero1,
        "zero2": zero2,
        "sharded_groups": sharded_groups,
        "hybrid": hybrid,
        "parameter_server": parameter_server,
        "sharded_parameter_server": sharded_parameter_server,
        "naive": naive,
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "folded": folded,
        "cuckoo": cuckoo,
        "overflow": overflow,
        "looped_bfs": looped_bfs,
        "looped_dfs": looped_dfs,
        "interleaved": interleaved,
        "lpp": lpp,
        "fslpp": fslpp,
        "zb_h1": zb_h1,
        "zb_h2": zb_h2,
        "zb_v": zb_v,
        "v_half": v_half,
        "v_min": v_min,
        "auto": auto,
        "graph": graph,
        "bubble_filled": bubble_filled,
        "nested": nested,
        "local_sgd": local_sgd,
        "pipedream": pipedream,
        "pipedream_2bw": pipedream_2bw,
        "stale_by_one": stale_by_one,
        "pipemare": pipemare,
    }
)

# Not equal to eager training.
STALE = ("local_sgd", "pipedream", "pipedream_2bw", "stale_by_one", "pipemare")

__all__ = [
    "LIBRARY",
    "STALE",
    "auto",
    "bubble_filled",
    "cuckoo",
    "ddp",
    "folded",
    "forward_first",
    "fsdp",
    "fslpp",
    "gpipe",
    "graph",
    "hsdp",
    "hybrid",
    "interleaved",
    "local_sgd",
    "looped_bfs",
    "looped_dfs",
    "lpp",
    "naive",
    "nested",
    "oldest_microbatch_first",
    "oldest_stage_first",
    "one_f_one_b",
    "overflow",
    "parameter_server",
    "parked",
    "pipedream",
    "pipedream_2bw",
    "pipemare",
    "replicate",
    "sharded",
    "sharded_groups",
    "sharded_parameter_server",
    "stage_first",
    "stale_by_one",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "zero1",
    "zero2",
]
