"""Random models in shards beside eager PyTorch: python -m tests.random_shards [COUNT].

Each seed draws a DAG of linear, attention, norm and elementwise layers, how many shards
its stages have, w and n: the plan is checked, and losses, gradients and parameters
after two steps of AdamW equal eager's. A model of which nothing can be cut is an error
that says so. A seed that fails prints its model; `1 --first SEED` runs it again.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxsched
from fxsched import Direction, PlanError, Schedule, schedules

from .cases import assert_equal, eager_step, train

BATCH, LENGTH = 8, 6
NOTHING = "no weight can be cut"


class Attention(nn.Module):
    """Of heads that may share keys; projected at once or apart, by SDPA or without."""

    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        self.heads = draw.choice((2, 4, 6, 8))
        self.shared = draw.choice((1, 1, 2))
        self.size = draw.choice((1, 4, 6))
        self.way = draw.choice(("sdpa", "softmax", "einsum"))
        self.fused = self.shared == 1 and draw.random() < 0.4
        self.splits = draw.choice(("chunk", "split", "unbind", "tensor_split"))
        self.grouped = draw.random() < 0.5
        self.causal, bias = draw.random() < 0.5, draw.random() < 0.5
        inner, fewer = self.heads * self.size, self.heads * self.size // self.shared
        if self.fused:
            self.qkv = nn.Linear(width, 3 * inner, bias)
        else:
            self.query = nn.Linear(width, inner, bias)
            self.key = nn.Linear(width, fewer, bias)
            self.value = nn.Linear(width, fewer, bias)
        self.out = nn.Linear(inner, width, bias)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = self.at_once(x) if self.fused else self.apart(x, memory)
        grouped = self.shared > 1 and self.way == "sdpa" and self.grouped
        if self.shared > 1 and not grouped:
            k, v = (each.repeat_interleave(self.shared, 1) for each in (k, v))
        if self.way == "sdpa":
            mixed = F.scaled_dot_product_attention(
                q, k, v, is_causal=self.causal, enable_gqa=grouped
            )
        else:
            scores = (
                q @ k.transpose(-2, -1)
                if self.way == "softmax"
                else torch.einsum("bhid,bhjd->bhij", q, k)
            ) / math.sqrt(self.size)
            if self.causal:
                above = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
                scores = scores.masked_fill(above, -math.inf)
            mixed = scores.softmax(-1) @ v
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

    def at_once(self, x: Tensor) -> Sequence[Tensor]:
        qkv = self.qkv(x)
        if self.splits == "unbind":
            blocks = qkv.view(*x.shape[:-1], 3, self.heads, self.size)
            return blocks.permute(2, 0, 3, 1, 4).unbind(0)
        inner = self.heads * self.size
        parts: Mapping[str, Callable[[], Sequence[Tensor]]] = {
            "chunk": lambda: qkv.chunk(3, -1),
            "split": lambda: qkv.split(inner, -1),
            "tensor_split": lambda: qkv.tensor_split((inner, 2 * inner), -1),
        }
        return [
            each.view(*x.shape[:-1], -1, self.size).transpose(1, 2)
            for each in parts[self.splits]()
        ]

    def apart(self, x: Tensor, memory: Tensor) -> Sequence[Tensor]:
        return [
            each.unflatten(-1, (-1, self.size)).transpose(1, 2)
            for each in (self.query(x), self.key(memory), self.value(memory))
        ]


class Feed(nn.Module):
    """Up, an activation, and down; or gated by a second layer up."""

    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        hidden, bias = draw.choice((4, 8, 12, 24, 15)), draw.random() < 0.5
        self.up = nn.Linear(width, hidden, bias)
        self.gate = nn.Linear(width, hidden, bias) if draw.random() < 0.5 else None
        self.down = nn.Linear(hidden, width, bias)
        self.act = draw.choice((F.gelu, F.silu, torch.tanh))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.up(x))
        if self.gate is not None:
            hidden = hidden * self.gate(x)
        out: Tensor = self.down(hidden)
        return out


class Net(nn.Module):
    """Layers that each read one or two values before them; what nothing reads is added
    up in the loss."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        width = draw.choice((4, 8, 12))
        self.width, self.inputs = width, draw.choice((1, 1, 2))
        self.words = nn.Embedding(16, width)
        self.layers = nn.ModuleList()
        self.steps: list[tuple[str, int, tuple[int, ...]]] = []
        unread = set(range(self.inputs))
        kinds: dict[str, Callable[[], nn.Module]] = {
            "attention": lambda: Attention(draw, width),
            "feed": lambda: Feed(draw, width),
            "linear": lambda: nn.Linear(width, width, draw.random() < 0.5),
            "norm": lambda: draw.choice((nn.LayerNorm, nn.RMSNorm))(width),
            "cat": lambda: nn.Linear(2 * width, width),
            "relu": nn.ReLU,
            "add": nn.Identity,
            "mul": nn.Identity,
        }
        names = ["attention", "feed", *draw.choices([*kinds], k=draw.randint(2, 7))]
        draw.shuffle(names)
        for number, name in enumerate(names):
            known = self.inputs + number
            again = [i for n, i, _ in self.steps if n == name]
            if again and draw.random() < 0.2:  # one module twice
                layer = draw.choice(again)
            else:
                layer = len(self.layers)
                self.layers.append(kinds[name]())
            first = draw.choice(sorted(unread)) if draw.random() < 0.7 else -1
            first = draw.randrange(known) if first < 0 else first
            reads = (first, draw.randrange(known))
            self.steps.append((name, layer, reads))
            both = name in ("attention", "cat", "add", "mul")
            unread -= set(reads if both else reads[:1])
            unread.add(known)
        self.unread = sorted(unread)
        if draw.random() < 0.2:  # tied weights
            linear = [m for m in self.modules() if isinstance(m, nn.Linear)]
            alike = [m for m in linear if m.weight.shape == linear[0].weight.shape]
            alike[-1].weight = alike[0].weight

    def forward(self, words: Tensor, x: Tensor) -> Tensor:
        values = [self.words(words), x][: self.inputs]
        for name, number, (a, b) in self.steps:
            layer, one, other = self.layers[number], values[a], values[b]
            if name == "attention":
                made = one + layer(one, other)
            elif name == "feed":
                made = one + layer(one)
            elif name == "cat":
                made = layer(torch.cat((one, other), -1))
            elif name == "add":
                made = one + other
            elif name == "mul":
                made = one * torch.sigmoid(other)
            else:
                made = layer(one)
            values.append(made)
        total = torch.zeros(())
        for number in self.unread:
            total = total + (values[number] - 0.5).square().mean()
        return total

    def extra_repr(self) -> str:
        return f"inputs={self.inputs}, steps={self.steps}, unread={self.unread}"


def random_schedule(draw: random.Random) -> Schedule:
    """One of the library's in shards, or a random w and n that ask for the shard."""
    shards, count = draw.choice((2, 2, 3, 4)), draw.choice((2, 4))
    made: Mapping[str, Callable[[], Schedule]] = {
        "gpipe": lambda: schedules.gpipe(1, count),
        "1f1b": lambda: schedules.one_f_one_b(2, count),
        "zb_h1": lambda: schedules.zb_h1(2, count),
        "graph": lambda: schedules.graph(2, count),
        "fsdp": lambda: schedules.fsdp(2, count),
        "replicas": lambda: schedules.replicate(schedules.gpipe(1, count // 2), 2),
    }
    if draw.random() < 0.5:
        return schedules.sharded(made[draw.choice([*made])](), shards)
    stages, workers = draw.choice((1, 2, 3)), draw.randint(shards, 6)
    seed, keeps = draw.random(), draw.random() < 0.5

    def any_of(*key: object) -> random.Random:
        return random.Random(f"{seed}{key}")

    def w(s: int, b: int, d: Direction, p: int) -> tuple[int, int]:
        compute = any_of(s, b, d, p).randrange(workers)
        keeper = any_of(s, p).randrange(workers)
        return (keeper if keeps else compute), compute

    def n(s: int, b: int, d: Direction, p: int) -> int:
        return any_of("n", s, b, d, p).randrange(50)

    return Schedule(workers, count, stages, w, n, shards=shards, name="random")


def build(seed: int) -> tuple[Net, Schedule, dict[str, Any]]:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    net, schedule = Net(draw), random_schedule(draw)
    return net, schedule, {"order": draw.choice(("static", "dynamic"))}


def check(seed: int) -> str:
    """What came of a seed: "equal", or "nothing" where nothing can be cut. Raises
    AssertionError if they differ."""
    net, schedule, options = build(seed)
    torch.manual_seed(seed)
    inputs = (
        torch.randint(16, (BATCH, LENGTH)),
        torch.randn(BATCH, LENGTH, net.width),
    )
    eager = copy.deepcopy(net)
    backend = fxsched.backend(schedule, transport="threads", **options)
    run = torch.compile(net, backend=backend)

    def step() -> Tensor:
        loss: Tensor = run(*inputs)
        loss.backward()
        return loss

    try:
        found = train(net, step, "adamw", steps=2)
    except PlanError as error:
        if NOTHING in str(error):
            return "nothing"
        raise
    count = schedule.microbatches
    wanted = train(eager, lambda: eager_step(eager, inputs, count), "adamw", steps=2)
    for name, gradient in wanted.gradients.items():
        if gradient is None and found.gradients[name] is not None:
            raise AssertionError(f"{name} has a gradient, and eager's has none")
    wanted.gradients = {k: g for k, g in wanted.gradients.items() if g is not None}
    assert_equal(found, wanted, near=3e-6)
    assert backend.plan is not None
    backend.plan.check()
    return "equal"


def sweep(seeds: Sequence[int]) -> Counter[str]:
    """How many seeds came to what; prints those that fail."""
    found: Counter[str] = Counter()
    for seed in seeds:
        torch._dynamo.reset()
        start = time.perf_counter()
        try:
            result = check(seed)
        except Exception as error:
            result = "failed"
            net, schedule, options = build(seed)
            text = " ".join(str(error).split())[:400]
            print(f"{net}\n{schedule} {options}\n{type(error).__name__}: {text}")
        found[result] += 1
        print(f"{seed}: {result} ({time.perf_counter() - start:.1f} s)", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("count", nargs="?", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = sweep(range(given.first, given.first + given.count))
    print(", ".join(f"{n} {result}" for result, n in found.items()))
    sys.exit(found["failed"] > 0)


if __name__ == "__main__":
    main()
