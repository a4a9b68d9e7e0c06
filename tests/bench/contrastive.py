"""Two encoders and a loss over all pairs of the batch, beside gradient caching.

The rival trains the same model in one process, as GradCache does (Gao et al. 2021,
arXiv 2101.06983): F of all microbatches without a graph, loss and gradients of the
embeddings on all rows, then F again and B of each microbatch. Contestants take their
steps in turn; a step lasts as long as on its slowest rank. Before it is timed, a
contestant's gradients must be eager PyTorch's on the whole batch.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import fxsched
from fxsched import Schedule, schedules
from fxsched.draw.tables import byte_text
from fxsched.ir.request import Carry, Pairs
from fxsched.models.two_tower import Tower, TwoTowerConfig

from .measure import Contestant, check, measure

TOLERANCE = 1e-4  # of gradients: sums over the batch have other orders


def _short_stages(workers: int, microbatches: int) -> Schedule:
    """Two stages a worker: B computes the half of what it has again at a time."""
    return replace(schedules.graph(workers, microbatches), stages=2 * workers)


SCHEDULES: Mapping[str, tuple[Callable[[int, int], Schedule], Carry]]
SCHEDULES = MappingProxyType(
    {
        "graph": (schedules.graph, "saved"),
        "graph, recomputed": (_short_stages, "recompute"),
        "1f1b": (schedules.one_f_one_b, "saved"),
        "1f1b, recomputed": (schedules.one_f_one_b, "recompute"),
        "ddp": (schedules.ddp, "saved"),
        "ddp, joint pairs": (schedules.ddp, "saved"),
    }
)


class Towers(nn.Module):
    """Two towers and CLIP's loss."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        torch.manual_seed(0)
        length, width = options.length, options.width
        config = TwoTowerConfig(
            vocabulary=options.vocabulary,
            code_length=length,
            doc_length=length,
            width=width,
            layers=options.layers,
        )
        words = [nn.Embedding(options.vocabulary, width) for _ in range(2)]
        self.towers = [Tower(config, each, length) for each in words]
        self.a, self.b = self.towers
        self.scale = nn.Parameter(torch.tensor(1.0))

    def embed(self, tower: int, tokens: Tensor) -> Tensor:
        """tokens [rows, length] -> [rows, width], of length 1."""
        return F.normalize(self.towers[tower](tokens), dim=-1)

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        """Of embeddings, both [batch, width]."""
        logits = self.scale.exp() * a @ b.T
        own = torch.arange(len(a))
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.loss(self.embed(0, a), self.embed(1, b))


class Cached:
    """A step with gradient caching, on rank 0 alone.

    held: bytes of activations at most: those of one microbatch, and embeddings of all.
    """

    def __init__(self, model: Towers, inputs: Sequence[Tensor], microbatches: int):
        self.model, self.held = model, 0
        self.pieces = [tokens.chunk(microbatches) for tokens in inputs]

    def step(self) -> None:
        """Leaves the gradients; the other ranks wait in the next barrier."""
        if dist.get_rank():
            return
        model = self.model
        with torch.no_grad():
            rows = [
                torch.cat([model.embed(tower, piece) for piece in pieces])
                for tower, pieces in enumerate(self.pieces)
            ]
        leaves = [each.requires_grad_() for each in rows]
        model.loss(*leaves).backward()
        for tower, pieces in enumerate(self.pieces):
            gradient = leaves[tower].grad
            assert gradient is not None
            parts = gradient.chunk(len(pieces))
            for piece, part in zip(pieces, parts, strict=True):
                model.embed(tower, piece).backward(part)

    def weigh(self) -> None:
        """Runs a step and notes what it holds."""
        weights = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        saved: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        piece, width = self.pieces[0][0], self.model.towers[0].norm.weight.numel()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            embedded = self.model.embed(0, piece)
        rows = sum(len(piece) for pieces in self.pieces for piece in pieces)
        self.held = sum(saved.values()) + 2 * rows * width * embedded.element_size()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of the command."""
    add = parser.add_argument
    add("--workers", type=int, default=2, help="ranks (2)")
    add("--microbatches", type=int, help="(8, or the next multiple of the workers)")
    add("--layers", type=int, default=4, help="blocks of each tower (4)")
    add("--width", type=int, default=256, help="(256)")
    add("--length", type=int, default=64, help="tokens of a sequence (64)")
    add("--vocabulary", type=int, default=4096, help="(4096)")
    add("--batch", type=int, help="(8 for each microbatch)")
    names = list(SCHEDULES)
    add("--only", nargs="+", choices=names, default=names, metavar="NAME")
    add("--steps", type=int, default=10, help="of each contestant (10)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    workers = dist.get_world_size()
    options.microbatches = options.microbatches or -(-8 // workers) * workers
    options.batch = options.batch or 8 * options.microbatches
    shape = (options.batch, options.length)
    generator = torch.Generator().manual_seed(1)
    inputs = [
        torch.randint(1, options.vocabulary, shape, generator=generator)
        for _ in range(2)
    ]
    model = Towers(options)
    model(*inputs).backward()
    gradients = ((name, p.grad) for name, p in model.named_parameters())
    wanted = {name: grad for name, grad in gradients if grad is not None}
    cached = Cached(Towers(options), inputs, options.microbatches)
    cached.weigh()
    contestants = [Contestant("gradient caching", cached.model, cached.step)]
    backends: dict[str, fxsched.Backend] = {}
    for name in options.only:
        make, carry = SCHEDULES[name]
        schedule = make(workers, options.microbatches)
        pairs: Pairs = "joint" if "joint pairs" in name else "auto"
        backends[name] = fxsched.backend(schedule, carry=carry, pairs=pairs)
        contestants.append(ours(name, Towers(options), backends[name], inputs))
    for contestant in contestants:
        check(contestant, wanted, TOLERANCE)
    taken = measure(contestants, options.steps)
    if not dist.get_rank():
        seconds = {each.name: taken[id(each)] for each in contestants}
        errors = {each.name: each.error for each in contestants}
        held = {
            name: predicted(each, name, options, inputs)
            for name, each in backends.items()
        }
        print(table(seconds, held | {"gradient caching": cached.held}, errors))
    dist.destroy_process_group()
    return 0


def ours(
    name: str, model: Towers, backend: fxsched.Backend, inputs: Sequence[Tensor]
) -> Contestant:
    step = torch.compile(model, backend=backend)
    return Contestant(name, model, lambda: step(*inputs).backward())


def predicted(
    backend: fxsched.Backend,
    name: str,
    options: argparse.Namespace,
    inputs: Sequence[Tensor],
) -> float:
    """Bytes of activations on the worker that holds the most. Where B runs F again,
    what that saves in one job is held too."""
    assert backend.plan is not None
    held = [peaks.each.activations for peaks in backend.plan.memory]
    schedule, carry = backend.plan.schedule, SCHEDULES[name][1]
    if carry == "recompute":
        saved = fxsched.plan(Towers(options), schedule, *inputs)
        jobs = [0.0] * len(held)
        for job, placed in saved.placements.items():
            stage = saved.stages.nodes[job.stage]
            jobs[placed.compute] = max(jobs[placed.compute], stage["held"])
        held = [a + b for a, b in zip(held, jobs, strict=True)]
    return max(held)


def table(
    seconds: Mapping[str, Sequence[float]],
    held: Mapping[str, float],
    errors: Mapping[str, float],
) -> str:
    rival = seconds["gradient caching"]
    rows = []
    for name, taken in seconds.items():
        pairs = zip(taken, rival, strict=True)
        ratio = statistics.median(mine / other for mine, other in pairs)
        rows.append(
            (
                name,
                f"{1000 * statistics.median(taken):.0f}",
                f"{ratio:.3f}",
                byte_text(held[name]),
                f"{errors[name]:.0e}",
            )
        )
    return tabulate(
        rows,
        ["contestant", "ms", "/ caching", "activations", "error"],
        colalign=("left", "right", "right", "right", "right"),
        disable_numparse=True,
    )
