"""Blocks that repeat are traced once, and give what tracing the whole stage does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import fxsched
from fxsched import schedules
from fxsched.autodiff import autograd, equal_blocks
from fxsched.autodiff.stage_graphs import StageGraphs
from fxsched.models.gpt import GPT, GPTConfig
from fxsched.passes import differentiate

SIZE = 8


class Layers(nn.Module):
    """An embedding, equal blocks, and a loss."""

    def __init__(self, make: Callable[[int], nn.Module], count: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.blocks = nn.ModuleList(map(make, range(count)))
        self.last = nn.Linear(SIZE, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).sin()
        for block in self.blocks:
            x = block(x)
        return self.last(x).pow(2).mean()


class Residual(nn.Module):
    def __init__(self, place: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.up(self.norm(x))))


class Checkpointed(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore


class Dropped(Residual):
    """Blocks differ by a constant, as timm's drop path rates do."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.rate = 0.1 * place

    def forward(self, x: Tensor) -> Tensor:
        return x + (1 - self.rate) * torch.tanh(self.up(self.norm(x)))


class Frozen(Residual):
    """The first half of the blocks is not trained, as when the top is tuned."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.requires_grad_(place >= 2)


class Counting(Residual):
    """Writes a buffer."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x) + 0 * self.calls


class Biased(nn.Module):
    """All blocks read one trained bias, as T5's do."""

    def __init__(self, uses: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(4))
        self.bias, self.uses = nn.Linear(SIZE, SIZE), uses

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias(x).sin()
        for block in self.blocks:
            x = block(x) * bias
            if self.uses > 1:
                x = x + bias
        return x.pow(2).mean()


class Returned(Layers):
    """Gives what blocks in the middle made, too."""

    def forward(self, x: Tensor) -> Any:
        x, given = self.first(x).sin(), []
        for block in self.blocks:
            x = block(x)
            given.append(x)
        return self.last(x).pow(2).mean(), given[1]


def gpt(dropout: float = 0.0) -> GPT:
    return GPT(GPTConfig(16, SIZE, SIZE, heads=2, layers=4, dropout=dropout))


class Watched(Layers):
    """Gives two values without gradients of each block, too."""

    def forward(self, x: Tensor) -> Any:
        x, given = self.first(x).sin(), []
        for block in self.blocks:
            x = block(x)
            given += [x.detach().exp(), x.detach().sin()]
        return self.last(x).pow(2).mean(), *given


LINKED: dict[str, Callable[[], nn.Module]] = {
    "gpt": gpt,
    "dropout": lambda: gpt(0.1),
    "residual": lambda: Layers(Residual),
    "checkpointed": lambda: Layers(Checkpointed),
    "frozen": lambda: Layers(Frozen),
    "one bias": lambda: Biased(1),
    "buffers": lambda: Layers(Counting),
    "watched": lambda: Watched(Residual),
    "returned": lambda: Returned(Residual),
}
WHOLE: dict[str, Callable[[], nn.Module]] = {  # none repeat, or other sums
    "constants": lambda: Layers(Dropped),
    "one bias, read twice": lambda: Biased(2),
}


class Seen:
    """Traces each stage in pieces and as a whole."""

    def __init__(self) -> None:
        self.pairs: list[tuple[StageGraphs, StageGraphs]] = []
        self.linked: list[bool] = []
        self.traces = 0

    def trace(self, module: fx.GraphModule, *more: Any) -> StageGraphs:
        *rest, blocks = more
        self.linked.append(autograd._linked(module, *rest, blocks) is not None)
        before = len(blocks)
        graphs = autograd.trace_stage(module, *rest, blocks)
        assert len(blocks) == before  # known from the trace ahead
        self.traces = before
        with patch.object(autograd, "equal_pieces", lambda *_: []):
            whole = autograd.trace_stage(module, *rest, {})
        self.pairs.append((graphs, whole))
        return graphs


@pytest.fixture
def seen() -> Iterator[Seen]:
    seen = Seen()
    with (
        patch.object(differentiate, "trace_stage", seen.trace),
        patch.object(equal_blocks, "SAVED", 2),
    ):
        yield seen


def train(model: nn.Module, autocast: bool = False) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    options = dict(transport="threads", loss_reduction="mean")
    backend = fxsched.backend(schedules.gpipe(1, 2), **options)
    inputs = [torch.randn(4, SIZE)]
    if isinstance(model, GPT):
        inputs = [torch.randint(0, 16, (4, SIZE))] * 2
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        torch.compile(model, backend=backend)(*inputs)


class Terms:
    """What graphs of a stage compute, as numbers: the same for the same operation on
    the same terms, in whatever order operations stand."""

    def __init__(self) -> None:
        self.known: dict[Any, int] = {}

    def stage(self, graphs: StageGraphs) -> list[int]:
        """Of what F gives without what it saves, and of all gradients."""
        places = graphs.forward.graph.find_nodes(op="placeholder")
        given = self._results(graphs.forward, [("F", i) for i in range(len(places))])
        first = len(given) - len(graphs.saved)
        backward = graphs.backward
        assert backward is not None
        needs = [
            ("saved", given[first + i]) if what == "saved" else (what, i)
            for what, i in graphs.needs
        ]
        return given[:first] + self._results(backward, needs)

    def _results(self, gm: fx.GraphModule, places: list[Any]) -> list[int]:
        terms: dict[fx.Node, int] = {}
        arguments = iter(places)
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                terms[node] = self._number(next(arguments))
            elif node.target is torch.ops.aten.detach.default:
                terms[node] = terms[node.args[0]]
            elif node.op == "call_function":
                read = fx.map_arg((node.args, node.kwargs), terms.__getitem__)
                terms[node] = self._number((str(node.target), repr(read)))
        return [terms[node] for node in gm.graph.output_node().args[0]]

    def _number(self, term: Any) -> int:
        return self.known.setdefault(term, len(self.known))


@pytest.mark.parametrize(
    ("name", "autocast"), [(n, cast) for n in LINKED for cast in (False, True)]
)
def test_linked_blocks_are_the_whole_trace(
    name: str, autocast: bool, seen: Seen
) -> None:
    train(LINKED[name](), autocast)
    assert seen.linked == [True]
    ((linked, whole),) = seen.pairs
    terms = Terms()
    assert terms.stage(linked) == terms.stage(whole)
    for field in ("mutated", "held", "own", "state_gradients", "tangents", "random"):
        assert getattr(linked, field) == getattr(whole, field)


@pytest.mark.parametrize("name", WHOLE)
def test_other_stages_are_traced_whole(name: str, seen: Seen) -> None:
    train(WHOLE[name]())
    assert seen.linked == [False]


def test_equal_blocks_are_traced_once(seen: Seen) -> None:
    train(Layers(Residual, 12))
    assert seen.traces == 3  # the first layer, a block, the last layer and the loss


def test_lines_of_the_model_are_those_of_each_block(seen: Seen) -> None:
    train(Layers(Residual, 4))
    ((linked, whole),) = seen.pairs
    for a, b in ((linked.forward, whole.forward), (linked.backward, whole.backward)):
        assert a is not None and b is not None
        assert [_line(n) for n in a.graph.nodes] == [_line(n) for n in b.graph.nodes]


def _line(node: fx.Node) -> Any:
    return node.meta.get("custom", {}).get("line") if node.op != "placeholder" else None
