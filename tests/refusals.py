"""What a model may not do: small models, each refused by a PlanError with its line.

`python -m tests.refusals` writes docs/refusals.md from what they raise; a test holds
the page against it.
"""

from __future__ import annotations

import inspect
import random
import re
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxsched
from fxsched import PlanError, schedules

PAGE = Path(__file__).parents[1] / "docs" / "refusals.md"
HEAD = """\
# What is refused

With this page you can see which lines of a model fxsched refuses, and what to write
instead. Below each example is its error. fxsched raises the error before anything is
trained, and the error names the line of your model. In the examples, `m` is the model:

- `m.one` and `m.two` are linear layers, `m.norm` is a BatchNorm;
- `m.running` is a BatchNorm with `momentum=None`;
- `m.embed` is an embedding with `sparse=True`, `m.eye` is a sparse buffer;
- `m.mean` is a buffer, `m.lstm` is an LSTM of two layers with dropout;
- `x` is the batch, with a sample in each row.

The pages about schedules, ranks and options say what these refuse. `python -m
tests.refusals` writes this page.
"""


class Of(nn.Module):
    """Two linear layers, and a function of them and the input."""

    def __init__(self, then: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.one, self.two, self.then = nn.Linear(4, 4), nn.Linear(4, 4), then
        self.norm, self.embed = nn.BatchNorm1d(4), nn.Embedding(4, 4, sparse=True)
        self.running = nn.BatchNorm1d(4, momentum=None)
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.5)
        self.register_buffer("eye", torch.eye(4).to_sparse())
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        return self.then(self, x)


def gradient(m: Any, x: Tensor) -> Tensor:
    return torch.func.grad(lambda y: m.two(y).tanh().sum())(m.one(x)).pow(2).mean()


def tangent(m: Any, x: Tensor) -> Tensor:
    out, change = torch.func.jvp(m.two, (m.one(x),), (torch.ones_like(x),))
    return (out * change).mean()


def mapped(m: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: m.two(m.one(row)))(x).pow(2).mean()


def chosen(m: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, m.one, m.two, (x,)).pow(2).mean()


def branched(m: Any, x: Tensor) -> Tensor:
    return m.one(x).mean() if x.sum() > 0 else m.two(x).mean()


def normed(m: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda y: m.norm(m.one(y)), x, use_reentrant=False).pow(2).mean()


def averaged(m: Any, x: Tensor) -> Tensor:
    return m.running(m.one(x)).pow(2).mean()


def sparse(m: Any, x: Tensor) -> Tensor:
    return torch.sparse.mm(m.eye, m.one(x).T).pow(2).mean()


def embedded(m: Any, x: Tensor) -> Tensor:
    return m.embed(x.long().abs() % 4).pow(2).mean()


def distinct(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.one(x).float().unique().mean() * torch.histc(x).mean()


def drawn(m: Any, x: Tensor) -> Tensor:
    return m.one(x * random.random()).pow(2).mean()


def seeded(m: Any, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return m.one(x + torch.rand(4)).pow(2).mean()


def generated(m: Any, x: Tensor) -> Tensor:
    noise = torch.rand(4, generator=torch.Generator().manual_seed(1))
    return m.one(x + noise).pow(2).mean()


def by_row(m: Any, x: Tensor) -> Tensor:
    return torch.stack([m.one(row).pow(2).sum() for row in x]).mean()


def kept(m: Any, x: Tensor) -> Tensor:
    m.mean = 0.9 * m.mean + 0.1 * m.one(x).mean()
    return m.two(x).pow(2).mean() + m.mean


def scaled(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.one.weight.mul_(x.mean())
    return m.one(x).pow(2).mean()


def recurrent(m: Any, x: Tensor) -> Tensor:
    return m.lstm(x[None])[0].pow(2).mean()


def solved(m: Any, x: Tensor) -> Tensor:
    return torch.linalg.eigvals(m.one.weight).abs().sum() + m.one(x).pow(2).mean()


def saved(m: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(Tensor.half, Tensor.float):
        return m.one(x).pow(2).mean()


def hooked(m: Any, x: Tensor) -> Tensor:
    y = m.one(x)
    bound = (y * 2).detach().abs().mean()
    y.register_hook(lambda gradient: gradient.clamp(-bound, bound))
    return y.pow(2).mean()


CASES: tuple[Callable[[Any, Tensor], Any], ...] = (
    *(branched, distinct, sparse, embedded),
    *(normed, averaged, chosen, gradient, tangent, mapped, drawn, seeded, generated),
    *(by_row, kept, scaled, recurrent, solved, saved, hooked),
)


def stepped(model: nn.Module, x: Tensor, **options: Any) -> Any:
    """Loss and gradients of a call, of two microbatches."""
    step = torch.compile(
        model, backend=fxsched.backend(schedules.gpipe(2, 2)), **options
    )
    loss = step(x)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def refusal(then: Callable[[Any, Tensor], Any]) -> str:
    """The error of a model."""
    try:
        stepped(Of(then), torch.linspace(-1.0, 1.0, 16).view(4, 4))
    except PlanError as error:
        return str(error)
    finally:
        torch._dynamo.reset()
    raise AssertionError(f"{then.__name__} is not refused")


def body(then: Callable[..., Any]) -> str:
    lines = inspect.getsource(then).splitlines()[1:]
    return textwrap.dedent("\n".join(lines)).strip()


def said(then: Callable[[Any, Tensor], Any]) -> str:
    """Its error without the line, which stands beside it, and PyTorch's own words."""
    code = [line.strip() for line in body(then).splitlines()]
    lines = [line.strip() for line in refusal(then).splitlines()]
    kept = [
        re.sub(r"^\(\w+Exception: .*\)", "", line).removesuffix(" at")
        for line in lines
        if line not in code and not re.search(r"\.py(:\d+|\", line)|\^\^", line)
    ]
    text = kept[0]
    for line in filter(None, kept[1:]):
        joint = "" if line[0] in ",;" else " " if re.match(r"\(|and ", line) else "; "
        text = text.removesuffix(",") + joint + line
    return text.replace("torch.export stops", "torch.export stops here")


def page() -> str:
    """docs/refusals.md."""
    parts = [HEAD]
    for then in CASES:
        told = textwrap.fill(said(then), 92, break_on_hyphens=False)
        parts.append(f"```py\n{body(then)}\n```\n\n{told}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    PAGE.write_text(page())
    print(f"wrote {PAGE.name}: {len(CASES)} refusals")
