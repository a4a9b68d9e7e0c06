"""Random models as Python source: lines that read and make values of rows, of rows and
times, of features and single numbers, keep state, draw, hook and write.

A line's text has {0}, {1} for what it reads, {o} for what it makes and {n} for its
number. An attribute that it names, self.w{n}, is made by its letter, see MAKES.
"""

from __future__ import annotations

import linecache
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

# mypy: disable-error-code="no-any-return, override, no-untyped-call"

BATCH, WIDTH, TIMES, QUEUE = 8, 6, 3, 16


class Plain(Function):
    """tanh, with its own backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return g * (1 - y * y)


class Divided(Function):
    """A backward that divides by the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 8 / len(g)


class Centred(Function):
    """A backward in which rows meet."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g - g.mean(0)


class Weighed(Function):
    """Of rows and a weight, whose gradient is divided by the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0) / len(x)


NAMES = {"torch": torch, "F": F, "Plain": Plain, "Divided": Divided}
NAMES |= {"Centred": Centred, "Weighed": Weighed}
MAKES: dict[str, Callable[[], Any]] = {
    "l": lambda: nn.Linear(WIDTH, WIDTH),
    "w": lambda: nn.Parameter(torch.rand(WIDTH) + 0.5),
    "t": lambda: nn.Parameter(torch.rand(TIMES, WIDTH) + 0.5),
    "b": lambda: torch.randn(WIDTH),
    "q": lambda: torch.randn(QUEUE, WIDTH),
    "n": lambda: torch.zeros(()),
    "c": lambda: torch.zeros((), dtype=torch.long),
}

# By group: what is read, what is made (R rows, T rows and times, F features, S a single
# number, - nothing), and the text. A group is as probable as its first number.
LINES: dict[tuple[int, str], str] = {
    (14, "apart"): """
        R R = torch.tanh(self.l{n}({0}))
        R R = F.layer_norm({0}, ({0}.shape[-1],))
        R R = F.gelu({0}) + 0.1
        R R = {0}.softmax(-1) + {0}.flip(1)
        R R = {0}.cumsum(1) / 4
        RR R = {0} * torch.sigmoid({1})
        RR R = torch.where({0} > {1}, {0}, 0.5 * {1})
        RR R = torch.cat([{0}, {1}], 1)[:, ::2]
        RR R = torch.maximum({0}, {1})
        RF R = {0} + {1}
        RF R = {0} * torch.tanh({1})
        RS R = {0} * torch.sigmoid({1})
        R R = {0} * self.w{n}
        FF F = {0} + {1}
        F F = torch.tanh({0} * self.w{n})
        F S = {0}.mean()
        FS F = {0} * torch.cos({1})
        SS S = torch.tanh({0} - {1})""",
    (6, "times"): """
        R T = {0}[:, None] * self.t{n}
        RRR T = torch.stack([{0}, {1}, {2}], 1)
        T T = torch.tanh(self.l{n}({0}))
        T T = {0}.softmax(1)
        T T = F.scaled_dot_product_attention({0}, {0}, {0})
        T T = {0}.transpose(1, 2).cumsum(2).transpose(1, 2) / 2
        TF T = {0} - {1}
        TR T = {0} * torch.sigmoid({1})[:, None]
        T R = {0}.mean(1)
        T R = {0}[:, 0] + {0}.amax(1)
        T R = {0}.flatten(1)[:, :6]""",
    (6, "meets"): """
        R R = {0} - {0}.mean(0)
        R R = ({0} - {0}.mean(0)) / ({0}.std(0) + 1)
        R R = F.normalize({0}, dim=0)
        R R = {0}.sort(0).values
        R R = {0}.cumsum(0) / 8
        R R = {0} + {0}.flip(0) / 2
        R R = {0} - {0}.roll(1, 0) / 2
        R R = {0} - {0}.topk(2, 0).values.mean(0)
        RR R = torch.softmax({0} @ {1}.T, -1) @ {0}
        R R = {0} * torch.sigmoid({0}[:1])
        R R = {0}[{0}.cumsum(1).sum(1).argsort()]
        R R = torch.cat([{0}, {0} * 2])[: len({0})]
        R R = torch.cat({0}.chunk(2)[::-1])
        R R = {0}.masked_fill({0} > {0}.mean(), 0.5)
        R R = torch.where(({0} > 0.01).sum(0) > 4, {0}, {0} / 2)
        T T = {0} - {0}.mean((0, 1))
        T T = {0}.softmax(0) + {0}
        T T = {0} - {0}.logsumexp(0, keepdim=True) / 4""",
    (7, "reduces"): """
        R F = {0}.mean(0)
        R F = {0}.sum(0) / 8
        R F = {0}.amax(0)
        R F = {0}.std(0)
        R F = {0}[0] + {0}[-1]
        R F = {0}.logsumexp(0)
        R F = {0}[{0}[:, 0] > 0.01].sum(0) / 4
        R F = {0}.new_zeros(4, 6).index_add_(0, torch.arange(len({0})) % 4, {0})[1]
        RR F = ({0}.T @ {1}).sum(0) / 32
        T F = {0}.mean((0, 1))
        R S = {0}.mean()
        R S = ({0}.square().sum() + 1).sqrt() / 8
        R S = ({0} > 0.01).sum() / {0}.numel()
        RR S = ({0} * {1}).sum() / ({1}.square().sum() + 1)
        T S = {0}.amax()""",
    (3, "draws"): """
        R R = F.dropout({0}, 0.25)
        R R = {0} + 0.1 * torch.randn_like({0})
        R R = {0}[torch.randperm(len({0}))]
        R R = {0} * torch.rand(6)
        R R = {0} * torch.rand(())
        R R = {0} * (torch.rand(len({0}), 1) > 0.3)
        T T = F.dropout({0}, 0.5)
        - F = torch.randn(6)""",
    (8, "state"): """
        R - with torch.no_grad(): self.b{n}.lerp_({0}.mean(0), 0.1)
        R - self.b{n}.mul_(0.9).add_({0}.detach().sum(0), alpha=0.01)
        R - self.b{n} = self.b{n} * 0.9 + {0}.detach().mean(0) * 0.1
        R - self.b{n}.copy_(torch.maximum(self.b{n}, {0}.detach().amax(0)))
        R - self.q{n}[: len({0})] = {0}.detach()
        F - self.b{n}.copy_({0}.detach())
        S - self.n{n}.lerp_({0}.detach(), 0.5)
        R R = {0} - self.b{n}; self.b{n}.lerp_({0}.detach().mean(0), 0.1)
        R R = {0}; self.b{n}.lerp_({0}.detach().mean(0), 0.1); {o} = {o} - self.b{n}
        R R = {0} / (1 + self.n{n}); self.n{n}.add_(1)
        R R = {0} * torch.sigmoid(self.n{n} / 8); self.n{n}.add_(len({0}))
        R R = {0} @ self.q{n}.clone().T / 4; {o} = {o}[:, :6]; self.q{n}.mul_(0.9)
        R R = {0} - (({0} @ self.q{n}.clone().T).softmax(-1) @ self.q{n}.clone()); \
            at = (self.c{n} + torch.arange(len({o}))) % 16; \
            self.q{n}.index_copy_(0, at, {o}.detach()); self.c{n}.add_(len({o}))
        - F = self.b{n} * 2; self.b{n}.mul_(0.5)""",
    (4, "own"): """
        R R = Plain.apply({0})
        R R = Divided.apply({0})
        R R = Centred.apply({0})
        R R = Weighed.apply({0}, self.w{n})
        F F = Plain.apply({0})
        T T = Divided.apply({0})
        T T = Plain.apply({0})""",
    (4, "hooks"): """
        R R = {0} * 2; {o}.register_hook(lambda g: g / 2)
        R R = {0} * 1.5; {o}.register_hook(lambda g: g.clamp(-0.01, 0.01))
        R R = {0} * 2; {o}.register_hook(lambda g: g / (g.norm() + 1))
        R R = {0} * 2; {o}.register_hook(lambda g: g - g.mean(0))
        R R = {0} * 2; {o}.register_hook(lambda g: g * len(g) / 8)
        F F = {0} * 2; {o}.register_hook(lambda g: g.clamp(-0.1, 0.1))
        T T = {0} * 2; {o}.register_hook(lambda g: g / 2)""",
    (5, "writes"): """
        R R = {0}.clone(); {o}[:, 0] = 0.5
        R R = {0}.clone(); {o}[:, 1] += {0}[:, 0]
        R R = {0}.clone(); {o}[2:4] += {0}.mean(0)
        R R = {0}.clone(); {o}[0] = 0.5
        R R = {0}.clone(); {o}.mul_(0.5).add_({0}.mean(0))
        RF R = {0}.clone(); {o}.copy_({1} + {0})
        RR R = torch.zeros_like({0}); {o}[:, :3] = {0}[:, :3]; {o}[:, 3:] = {1}[:, 3:]
        R R = torch.zeros_like({0}); {o}[: len({0}) // 2] = {0}[len({0}) // 2 :]
        R F = torch.zeros(6); {o}[0] = {0}.mean(); {o}[1:3] += {0}.amax(0)[1:3]
        FS F = {0}.clone(); {o}[2] = {1}
        R S = torch.zeros(3); {o}[0] = {0}.mean(); {o} = {o}.sum()
        R R = {0}.clone(); {o}[{0} > 0.01] = 0.1
        R R = {0}.clone(); {o}.masked_fill_({0} > {0}.mean(0), 0.3)""",
}
LOSSES = (
    "({0} - y).square().mean()",
    "({0} - y).square().sum() / 8",
    "F.cross_entropy({0}, labels)",
    "F.cross_entropy({0}, labels, ignore_index=0)",
    "F.cross_entropy({0} @ F.normalize(y).T, torch.arange(len(y)))",
    "(({0} - y).square().mean(-1) * (labels > 1)).sum() / (labels > 1).sum()",
)


class Template(NamedTuple):
    """A line to be drawn. reads: the kinds of what it reads; makes: of what it makes,
    or "-"."""

    reads: str
    makes: str
    text: str
    trains: bool


class Line(NamedTuple):
    """A line of a model, which makes a value of a kind or, if that is "-", nothing."""

    number: int
    kind: str
    text: str
    reads: tuple[int, ...]

    def __str__(self) -> str:
        reads = [f"v{i}" for i in self.reads]
        out = f"v{self.number}"
        return self.text.format(*reads, o=out, n=self.number)


def _templates(group: str, text: str) -> list[Template]:
    found = []
    for line in text.strip().split("\n"):
        reads, makes, body = line.split(None, 2)
        body = body.removeprefix("= ") if makes == "-" else "{o} " + body
        trains = group == "hooks"
        found.append(Template(reads.strip("-"), makes, body, trains))
    return found


TEMPLATES = {
    name: (weight, _templates(name, text)) for (weight, name), text in LINES.items()
}


class Program(NamedTuple):
    """Lines of a model; of which a loss is made that reads what nobody else does."""

    lines: tuple[Line, ...]
    loss: str

    def __str__(self) -> str:
        """The source of forward(self, x, y, labels)."""
        body = ["v0 = self.l0(x)"]
        body += [p.strip() for line in self.lines for p in str(line).split("; ")]
        read = {i for line in self.lines for i in line.reads}
        ends = [each for each in self.lines if each.kind in "RTFS" and each.kind]
        rows = [0, *(each.number for each in ends if each.kind == "R")]
        body.append("loss = " + self.loss.format(f"v{rows[-1]}"))
        for each in ends:
            if each.number not in read:
                body.append(f"loss = loss + v{each.number}.square().mean() / 8")
        body.append("return loss")
        text = "\n".join(f"    {line}" for line in body)
        return f"def forward(self, x, y, labels):\n{text}\n"

    @property
    def draws(self) -> bool:
        """Whether random numbers are drawn."""
        return any(word in str(self) for word in ("rand", "dropout"))

    def without(self, number: int) -> Program:
        """Less a line; what reads it reads what it read first, or goes, too."""
        kinds = {0: "R", **{each.number: each.kind for each in self.lines}}
        instead: dict[int, int | None] = {}
        kept = []
        for line in self.lines:
            reads = tuple(instead.get(i, i) for i in line.reads)
            if line.number == number or None in reads:
                same = [i for i in reads if i is not None and kinds[i] == line.kind]
                instead[line.number] = same[0] if same else None
            else:
                kept.append(line._replace(reads=reads))  # type: ignore[arg-type]
        return self._replace(lines=tuple(kept))


def random_program(seed: int, size: int) -> Program:
    """So many lines."""
    draw = random.Random(seed)
    groups = list(TEMPLATES)
    weights = [TEMPLATES[name][0] for name in groups]
    # each model is of few groups, so that causes are met by themselves, too
    weights = [w * draw.choice((0, 0, 1, 3)) for w in weights[:]]
    weights[groups.index("apart")] = 14
    made: dict[str, list[int]] = {"R": [0], "T": [], "F": [], "S": []}
    trained: set[int] = {0}
    lines: list[Line] = []
    while len(lines) < size:
        (group,) = draw.choices(groups, weights)
        line = draw.choice(TEMPLATES[group][1])
        pools = [
            [i for i in made[kind] if i in trained or not line.trains]
            for kind in line.reads
        ]
        if not all(pools):
            continue
        reads = tuple(draw.choice(pool[-4:]) for pool in pools)
        number = len(lines) + 1
        lines.append(Line(number, line.makes, line.text, reads))
        if line.makes != "-":
            made[line.makes].append(number)
        if trained & set(reads) or re.search(r"self\.[lwt]", line.text):
            trained.add(number)
    return Program(tuple(lines), draw.choice(LOSSES))


class Drawn(nn.Module):
    """A model of a program; call it with batch()."""

    def __init__(self, program: Program, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        source = str(program)
        for name in sorted(set(re.findall(r"self\.([a-z]\d+)", source))):
            made = MAKES[name[0]]()
            if isinstance(made, Tensor) and not isinstance(made, nn.Parameter):
                self.register_buffer(name, made)
            else:
                setattr(self, name, made)
        place = f"<random model {seed}>"
        linecache.cache[place] = len(source), None, source.splitlines(True), place
        names: dict[str, Any] = {}
        exec(compile(source, place, "exec"), NAMES, names)
        self.compute = names["forward"]

    def forward(self, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
        return self.compute(self, x, y, labels)


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [8, 6], y [8, 6] and labels [8] below 6."""
    numbers = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, BATCH, WIDTH, generator=numbers)
    return x, y, torch.randint(0, WIDTH, (BATCH,), generator=numbers)
