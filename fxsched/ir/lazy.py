"""Graph modules whose Python is written when it is first read or run.

Writing and compiling it takes longer than building the graph, and most graphs of a plan
are only walked. The only file that knows torch.fx's lazy modules.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import fx
from torch.fx import _lazy_graph_module as lazy


def lazy_module(root: Any, graph: fx.Graph, name: str = "Graph") -> fx.GraphModule:
    """fx.GraphModule(root, graph, name) without its code, which comes when needed."""
    module: fx.GraphModule = lazy._LazyGraphModule(root, graph, name)
    return module


def all_lazy() -> AbstractContextManager[None]:
    """While it is open, torch's own passes make lazy modules too."""
    return lazy._use_lazy_graph_module(True)


def write_code(gm: fx.GraphModule) -> None:
    """Makes `gm.forward` the graph's code itself, not what writes it first."""
    lazy._LazyGraphModule.force_recompile(gm)
