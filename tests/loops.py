"""Random training loops, run by plain PyTorch and by a schedule, and compared."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

import fxsched
from fxsched import PlanError, Schedule, schedules

from .cases import anything

MICROBATCHES, WIDTH, WORDS = 4, 8, 11
SIZES = (4, 8, 12)


@dataclass(frozen=True)
class Loop:
    """A loop, by what it does. events: names with a number, in their order."""

    seed: int
    models: tuple[str, ...]
    schedule: str
    workers: int
    options: tuple[tuple[str, str], ...]
    optimizer: str
    scheduler: str
    set_to_none: bool
    events: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        lines = [f"{name} {number}" for name, number in self.events]
        head = f"loop {self.seed}: {' and '.join(self.models)} by {self.schedule}"
        options = ", ".join(f"{name}={value}" for name, value in self.options)
        return (
            f"{head} on {self.workers} workers ({options}), {self.optimizer}, "
            f"{self.scheduler}, set_to_none={self.set_to_none}\n  " + "\n  ".join(lines)
        )


EVENTS = {
    "train": 8,  # and its number: the batch's size
    "accumulate": 3,
    "clip": 3,
    "scaled": 2,
    "evaluate": 3,
    "ragged": 2,
    "autocast": 2,
    "unused": 2,
    "reseed": 2,
    "resume": 2,
    "model raises": 1,
    "pass raises": 1,
}


def random_loop(seed: int, ranks: int = 0) -> Loop:
    """The loop of a seed, for threads or for so many ranks."""
    draw = random.Random(seed)
    events = draw.choices(list(EVENTS), list(EVENTS.values()), k=draw.randint(4, 8))
    schedule = draw.choice(list(SCHEDULES))
    pipelines = ("gpipe", "1f1b", "interleaved", "zb_h1")
    normed = ("normed",) if schedule in pipelines else ()
    sizes = SIZES[1:] if schedule in pipelines else SIZES  # BatchNorm wants two rows
    kinds = ("loss", "rows", "tied", "frozen", "words", *normed)
    models = tuple(draw.choices(kinds, k=draw.choice((1, 1, 1, 2))))
    fills = ("pad",) if set(models) == {"rows"} else ()  # what has no loss
    return Loop(
        seed,
        models,
        schedule,
        ranks or draw.choice((2, 4)),
        (
            ("order", draw.choice(("static", "static", "dynamic"))),
            ("carry", draw.choice(("saved", "saved", "recompute"))),
            ("ragged", draw.choice(("error", "fewer", *fills))),
        ),
        draw.choice(("sgd", "momentum", "adamw", "groups")),
        draw.choice(("none", "step", "cosine")),
        draw.random() < 0.5,
        (("train", 8), *((name, draw.choice(sizes)) for name in events), ("train", 8)),
    )


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "ddp": lambda workers, seed: schedules.ddp(workers, MICROBATCHES),
    "fsdp": lambda workers, seed: schedules.fsdp(workers, MICROBATCHES),
    "gpipe": lambda workers, seed: schedules.gpipe(workers, MICROBATCHES),
    "1f1b": lambda workers, seed: schedules.one_f_one_b(workers, MICROBATCHES),
    "interleaved": lambda workers, seed: schedules.interleaved(2, MICROBATCHES),
    "zb_h1": lambda workers, seed: schedules.zb_h1(workers, MICROBATCHES),
    "graph": lambda workers, seed: schedules.graph(workers, MICROBATCHES),
    "random": lambda workers, seed: anything(seed, workers),
}


class Net(nn.Module):
    """Layers whose rows stay apart; `kind` says what is special."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "normed" else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        if kind == "tied":
            self.head.weight = self.table.weight
        if kind == "frozen":
            self.layers[0].requires_grad_(False)
            self.table.requires_grad_(False)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        hidden = self.table(ids) + x
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        scores: Tensor = self.head(self.norm(hidden))
        return scores if self.kind == "rows" else mean_loss(scores, ids)


def mean_loss(scores: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.float(), (ids + 1) % WORDS)


def optimizer_of(loop: Loop, models: list[nn.Module]) -> torch.optim.Optimizer:
    parameters = [p for m in models for p in m.parameters() if p.requires_grad]
    if loop.optimizer == "adamw":  # a small eps makes noise a full step
        return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-2)
    if loop.optimizer == "groups":
        half = len(parameters) // 2
        groups = [{"params": parameters[:half]}, {"params": parameters[half:]}]
        groups[1]["lr"] = 0.01  # type: ignore[assignment]
        return torch.optim.SGD(groups, lr=0.1)
    momentum = 0.9 if loop.optimizer == "momentum" else 0.0
    return torch.optim.SGD(parameters, lr=0.1, momentum=momentum)


def scheduler_of(loop: Loop, optimizer: torch.optim.Optimizer) -> Any:
    kinds = torch.optim.lr_scheduler
    if loop.scheduler == "step":
        return kinds.StepLR(optimizer, 2, 0.5)
    if loop.scheduler == "cosine":
        return kinds.CosineAnnealingLR(optimizer, 10)
    return kinds.LambdaLR(optimizer, lambda epoch: 1.0)


class Boom(Exception):
    """What a user's pass raises."""


class Trainer:
    """Runs a loop's events; `seen` is what a user could print."""

    def __init__(self, loop: Loop) -> None:
        torch.manual_seed(loop.seed)
        self.loop = loop
        self.models = [Net(kind).train() for kind in loop.models]
        self.start()
        self.seen: list[tuple[str, Tensor]] = []

    def start(self) -> None:
        """An optimizer, and whatever else belongs to a process that starts."""
        self.optimizer = optimizer_of(self.loop, list(self.models))
        self.scheduler = scheduler_of(self.loop, self.optimizer)

    # What plain PyTorch and a plan do differently

    def call(self, number: int, ids: Tensor, x: Tensor) -> Tensor:
        """The scores or the loss of a model, of all the batch."""
        return self.models[number](ids, x)

    def backward(self, number: int, ids: Tensor, x: Tensor, scale: float) -> Tensor:
        """The loss over the microbatches; its gradients, times scale, are added."""
        parts = max(p for p in range(1, MICROBATCHES + 1) if len(ids) % p == 0)
        if self.models[number].kind == "normed":
            parts = 1  # its statistics are the whole batch's
        total = torch.zeros(())
        for i, part in zip(ids.chunk(parts), x.chunk(parts), strict=True):
            loss = self.loss_of(number, self.call(number, i, part), i) / parts
            (loss * scale).backward()
            total = total + loss.detach()
        return total

    def clip(self) -> Tensor:
        parameters = [p for model in self.models for p in model.parameters()]
        return nn.utils.clip_grad_norm_(parameters, 0.5)

    def state(self) -> Any:
        return copy.deepcopy(
            ([m.state_dict() for m in self.models], self.optimizer.state_dict())
        )

    def load(self, state: Any) -> None:
        for model, own in zip(self.models, state[0], strict=True):
            model.load_state_dict(own)
        self.optimizer.load_state_dict(state[1])

    def fail(self, ids: Tensor, x: Tensor) -> None:
        """A call whose pass raises; there are none here."""

    def refused(self, number: int, ids: Tensor, x: Tensor) -> None:
        """A call with a batch that doesn't divide; eager needs none."""

    def recover(self) -> None:
        """After an exception."""

    # What both do

    def loss_of(self, number: int, out: Tensor, ids: Tensor) -> Tensor:
        return mean_loss(out, ids) if out.dim() else out

    def note(self, what: str, value: Tensor) -> None:
        self.seen.append((what, value.detach().clone()))

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Drawn from torch's own generator: a step must leave it as eager does."""
        return torch.randint(0, WORDS, (size,)), torch.randn(size, WIDTH)

    def run(self) -> None:
        for place, (name, number) in enumerate(self.loop.events):
            self.what = f"{place} {name} {number}"
            getattr(self, "on_" + name.replace(" ", "_"))(number)

    def step(self, size: int, scale: float = 1.0) -> None:
        for number in range(len(self.models)):
            loss = self.backward(number, *self.batch(size), scale)
            self.note(f"{self.what} loss of model {number}", loss)

    def update(self) -> None:
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=self.loop.set_to_none)

    def on_train(self, size: int) -> None:
        self.step(size)
        self.update()

    def on_accumulate(self, size: int) -> None:
        for _ in range(2):
            self.step(size)
        self.update()

    def on_clip(self, size: int) -> None:
        self.step(size)
        self.note(f"{self.what} norm", self.clip())
        self.update()

    def on_scaled(self, size: int) -> None:
        self.step(size, 3.0)
        self.update()

    def on_autocast(self, size: int) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            self.step(size)
        self.update()

    def on_ragged(self, size: int) -> None:
        """The last batch of an epoch; ragged="error" is drop_last=True."""
        if dict(self.loop.options)["ragged"] == "error":
            for number in range(len(self.models)):
                self.refused(number, *self.batch(size + 2))
        else:
            self.step(size + 2)
            self.update()

    def on_evaluate(self, size: int) -> None:
        for number, model in enumerate(self.models):
            model.eval()
            ids, x = self.batch(size)
            with torch.no_grad():
                out = self.call(number, ids, x)
            self.note(f"{self.what} of model {number}", out)
            model.train()

    def on_unused(self, size: int) -> None:
        for number in range(len(self.models)):
            ids, x = self.batch(size)
            if self.models[number].kind != "normed":
                self.loss_of(number, self.call(number, ids, x), ids)

    def on_reseed(self, size: int) -> None:
        torch.manual_seed(size)
        self.on_train(8)

    def on_resume(self, size: int) -> None:
        """A process ends and another goes on from what it saved."""
        state, order = self.state(), self.scheduler.state_dict()
        generator = torch.get_rng_state()
        self.models = [Net(kind).train() for kind in self.loop.models]
        self.start()
        self.load(state)
        self.scheduler.load_state_dict(order)
        torch.set_rng_state(generator)

    def on_model_raises(self, size: int) -> None:
        ids, x = self.batch(8)
        ids[5] = WORDS  # no word has this number
        if self.models[0].kind == "normed":
            return  # what came before has counted
        try:
            self.call(0, ids, x)
        except (IndexError, ConnectionError) as error:
            if "out of range" not in str(error):  # of this rank or another's
                raise
            self.recover()
            return
        raise Differs("a word that isn't there raised nothing")

    def on_pass_raises(self, size: int) -> None:
        self.fail(*self.batch(16))


class Planned(Trainer):
    """The same by a schedule, on threads or ranks."""

    def __init__(self, loop: Loop, ranks: bool) -> None:
        self.ranks = ranks
        self.raises = False
        super().__init__(loop)

    def start(self) -> None:
        super().start()
        self.backends, self.compiled = [], []
        for model in self.models:
            schedule = SCHEDULES[self.loop.schedule](self.loop.workers, self.loop.seed)
            options: Any = dict(self.loop.options)
            transport = None if self.ranks else "threads"
            backend = fxsched.backend(
                schedule, transport=transport, passes=[self.check], **options
            )
            self.backends.append(backend)
            self.compiled.append(torch.compile(model, backend=backend))

    def check(self, program: fx.GraphModule, request: object) -> fx.GraphModule:
        """A user's pass, which raises when told to."""
        if self.raises:
            raise Boom
        return program

    def call(self, number: int, ids: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.compiled[number](ids, x)
        return out

    def backward(self, number: int, ids: Tensor, x: Tensor, scale: float) -> Tensor:
        loss = self.loss_of(number, self.call(number, ids, x), ids)
        (loss * scale).backward()
        return loss.detach()

    def clip(self) -> Tensor:
        parameters = [p for model in self.models for p in model.parameters()]
        return fxsched.clip_grad_norm_(parameters, 0.5)

    def state(self) -> Any:
        if not self.ranks:
            return super().state()
        whole = nn.ModuleList(self.models)
        return (
            [fxsched.full_state_dict(model) for model in self.models],
            fxsched.full_optimizer_state_dict(whole, self.optimizer),
        )

    def refused(self, number: int, ids: Tensor, x: Tensor) -> None:
        try:
            self.call(number, ids, x)
        except PlanError as error:
            if "does not divide" not in str(error):
                raise
            self.recover()
        else:
            raise Differs("a batch that doesn't divide was not refused")

    def fail(self, ids: Tensor, x: Tensor) -> None:
        self.raises = True
        try:
            self.call(0, ids, x)
        except Boom:
            self.recover()
        except (PlanError, ConnectionError) as error:  # where another was the first
            if "Boom" not in str(error):
                raise
            self.recover()
        finally:
            self.raises = False

    def recover(self) -> None:
        for backend in self.backends:
            if hasattr(backend, "reset"):
                backend.reset()


def last_state(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers and the optimizer's state at the end."""
    models, optimizer = trainer.state()
    for number, state in enumerate(models):
        yield from ((f"model {number} {name}", value) for name, value in state.items())
    for number, state in optimizer["state"].items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                yield f"{name} of parameter {number}", value


class Differs(Exception):
    """Something in a loop isn't what eager gives."""


def compare(loop: Loop, ranks: bool = False) -> None:
    """Runs a loop both ways. Raises Differs, PlanError, or what else goes wrong."""
    wanted = Trainer(loop)
    wanted.run()
    with quiet():
        found = Planned(loop, ranks)
        found.run()
        states = dict(last_state(found))
    half = any(name == "autocast" for name, _ in loop.events)
    for (what, got), (name, want) in zip(found.seen, wanted.seen, strict=True):
        assert what == name
        same(what, got, want, half)
    for name, want in last_state(wanted):
        same(name, states.pop(name), want, half)
    if states:
        raise Differs(f"{', '.join(states)} are not in eager's state")


@contextmanager
def quiet() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def same(what: str, got: Tensor, want: Tensor, half: bool) -> None:
    relative, absolute = (5e-2, 2e-2) if half else (1e-4, 1e-5)
    absolute *= max(1.0, float(want.abs().max()))  # of what sums that large round to
    if not torch.allclose(got.float(), want.float(), relative, absolute):
        off = float((got.float() - want.float()).abs().max())
        raise Differs(f"{what} differs by {off:.2g}")
