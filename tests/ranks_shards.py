"""What each rank of test_shards_ranks.py does: python -m tests.ranks_shards FOLDER."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, Schedule, schedules
from fxsched.models.gpt import GPT, GPTConfig
from fxsched.params.record import record_of
from tests.cases import Result, build, eager_step, optimizer, train
from tests.placement.test_shards import placed_at_random

EVERY_RANK: dict[int, Callable[[], list[tuple[str, Schedule, str]]]] = {
    2: lambda: [
        ("gpt", schedules.sharded(schedules.gpipe(1, 4), 2), "static"),
        ("two_tower", schedules.sharded(schedules.gpipe(1, 2), 2), "dynamic"),
    ],
    4: lambda: [
        ("gpt", schedules.sharded(schedules.one_f_one_b(2, 4), 2), "static"),
        ("gpt", placed_at_random(), "dynamic"),
        (
            "two_tower",
            schedules.replicate(schedules.sharded(schedules.gpipe(1, 2), 2), 2),
            "static",
        ),
    ],
}


def assert_close(found: object, wanted: object, name: str = "") -> None:
    torch.testing.assert_close(
        found, wanted, rtol=1e-5, atol=2e-6, msg=lambda text: f"{name}: {text}"
    )


def equal() -> None:
    """Losses, norms of gradients, parameters, and what is in memory."""
    for name, schedule, order in EVERY_RANK[dist.get_world_size()]():
        model, inputs = build(name)
        wanted = eager(model, inputs, schedule.microbatches)
        whole = sum(p.nbytes for p in model.parameters())
        run = torch.compile(model, backend=fxsched.backend(schedule, order=order))
        update, losses = optimizer("adamw", model), []
        for number in range(3):
            update.zero_grad()
            loss = run(*inputs)
            loss.backward()
            losses.append(loss.detach())
            if not number:
                norms = fxsched.gradient_norms(model)
                for each, gradient in wanted.gradients.items():
                    if gradient is not None:
                        assert_close(norms[each], gradient.norm(), each)
            update.step()
        assert_close(losses, wanted.losses)
        state = fxsched.full_state_dict(model)
        for each, parameter in wanted.parameters.items():
            assert_close(state[each], parameter, each)
        held = [torch.tensor(0)] * dist.get_world_size()
        dist.all_gather(held, torch.tensor(sum(map(bytes_here, model.parameters()))))
        assert max(held) < 0.8 * whole, (held, whole)
        print(f"rank {dist.get_rank()}: {name} x {schedule.name} equal to eager")


def eager(model: nn.Module, inputs: tuple[Tensor, ...], count: int) -> Result:
    plain = copy.deepcopy(model)
    return train(plain, lambda: eager_step(plain, inputs, count), "adamw")


def bytes_here(parameter: Tensor) -> int:
    if parts := record_of(parameter).parts:
        return parts.values.nbytes
    return parameter.untyped_storage().nbytes()


class Training:
    """A small GPT in two shards, and AdamW.

    clip: to which the program clips gradients and steps; None for the loop's step."""

    def __init__(
        self, schedule: Schedule | None = None, clip: float | None = None
    ) -> None:
        torch.manual_seed(0)
        config = GPTConfig(vocabulary=32, width=16, layers=1, heads=2)
        self.model, self.inputs = GPT(config), (torch.ones(4, 6).long(),) * 2
        self.optimizer = optimizer("adamw", self.model)
        self.clip, options = clip, {}
        if clip is not None:
            options = {"optimizer": self.optimizer, "clip_grad_norm": clip}
        self.backend = fxsched.backend(schedule or in_shards(), **options)
        self.run = torch.compile(self.model, backend=self.backend)

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.run(*self.inputs)
        if self.clip is None:
            loss.backward()
            self.optimizer.step()
        return loss.detach()


def in_shards() -> Schedule:
    return schedules.sharded(schedules.gpipe(1, 2), dist.get_world_size())


def saved(folder: Path) -> None:
    """Every way to save and load gives the same next losses, in shards or without."""
    training = Training()
    training.step()
    fxsched.save(folder / "steps", training.model, training.optimizer, training.backend)
    fxsched.save_weights(folder / "weights", training.model)
    state = fxsched.full_state_dict(training.model)
    stepped = fxsched.full_optimizer_state_dict(training.model, training.optimizer)
    streamed = dict(fxsched.stream_state_dict(training.model))
    norms = fxsched.parameter_norms(training.model)
    for name, value in state.items():
        assert torch.equal(value, streamed[name]), name
    for name, norm in norms.items():
        assert_close(norm, state[name].norm(), name)
    wanted = [training.step() for _ in range(2)]
    for schedule in (None, schedules.gpipe(2, 2)):  # parts of shards, and whole
        for first in (False, True):  # before the first call, and after it
            other = Training(schedule)
            if not first:
                other.step()
            fxsched.load(folder / "steps", other.model, other.optimizer, other.backend)
            assert_close([other.step() for _ in range(2)], wanted, "loaded")
    other = Training()
    other.step()
    fxsched.load_full_state_dict(other.model, state)
    fxsched.load_full_optimizer_state_dict(other.model, other.optimizer, stepped)
    assert_close([other.step() for _ in range(2)], wanted, "loaded by hand")
    fxsched.load_weights(folder / "weights", other.model)
    again = fxsched.full_state_dict(other.model)
    for name, value in state.items():
        assert torch.equal(value, again[name]), name
    print(f"rank {dist.get_rank()}: saved and loaded")


def updates(folder: Path) -> None:
    """Programs that step the parts of weights equal eager, and what they save goes on
    in others, as it does in loops."""
    schedule = in_shards()
    if dist.get_world_size() == 4:
        schedule = schedules.sharded(schedules.zero1(2), 2)
    training, plain = Training(schedule, clip=0.1), Training()
    model, its_model = training.model, plain.model

    def eager_update() -> Tensor:
        plain.optimizer.zero_grad()
        loss = eager_step(its_model, plain.inputs, schedule.microbatches)
        torch.nn.utils.clip_grad_norm_(its_model.parameters(), 0.1)
        plain.optimizer.step()
        return loss

    for number in range(3):
        assert_close(training.step(), eager_update(), f"loss {number}")
    state = fxsched.full_state_dict(model)
    assert_close(state, dict(its_model.state_dict()), "parameters")
    stepped = fxsched.full_optimizer_state_dict(model, training.optimizer)
    assert_close(stepped, plain.optimizer.state_dict(), "state")
    with said("state of its own parameters alone; save fxsched.full_optimizer_state"):
        training.optimizer.state_dict()
    fxsched.save(folder / "updates", model, training.optimizer, training.backend)
    expected = [training.step() for _ in range(2)]
    other = Training(schedule, clip=0.1)
    if dist.get_world_size() == 4:  # before the first call, and after it
        other.step()
    fxsched.load(folder / "updates", other.model, other.optimizer, other.backend)
    assert_close([other.step() for _ in range(2)], expected, "loaded")
    fxsched.load_full_state_dict(other.model, state)
    fxsched.load_full_optimizer_state_dict(other.model, other.optimizer, stepped)
    loop = fxsched.backend(schedule)  # the same parameters, stepped by the loop
    loss = torch.compile(other.model, backend=loop)(*other.inputs)
    loss.backward()
    fxsched.clip_grad_norm_(other.model, 0.1)
    other.optimizer.step()
    eager_update()
    state = fxsched.full_state_dict(other.model)
    assert_close(state, dict(its_model.state_dict()), "the loop's step")
    assert_close(other.step(), expected[1], "after the loop's step")
    print(f"rank {dist.get_rank()}: updates equal to eager")


def loops() -> None:
    """What a loop does with gradients and parameters, beside eager PyTorch."""
    training, plain = Training(), Training()
    model, inputs = training.model, training.inputs
    norm = clip = None
    for own, run in ((training, training.run), (plain, plain.model)):
        for _ in range(2):  # gradients add up
            own_loss = run(*inputs)
            own_loss.backward()
        if own is training:
            norm = fxsched.clip_grad_norm_(model, 0.1)
            run(*(each[:2] for each in inputs))  # traced anew, beside gradients
        else:
            clip = torch.nn.utils.clip_grad_norm_(own.model.parameters(), 0.1)
        own.optimizer.step()
        own.optimizer.zero_grad(set_to_none=False)
        run(*inputs).backward()  # into the zeros that are there
        own.optimizer.step()
    assert_close(norm, clip, "norm")
    with fxsched.local_parts(model), torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    with torch.no_grad():
        for parameter in plain.model.parameters():
            parameter -= 0.1 * parameter.grad
    state = fxsched.full_state_dict(model)
    for name, parameter in plain.model.named_parameters():
        assert_close(state[name], parameter.detach(), name)
    with torch.no_grad():
        assert_close(training.run(*inputs), plain.model(*inputs), "evaluation")
    print(f"rank {dist.get_rank()}: loops equal to eager")


def refused() -> None:
    training = Training()
    training.step()
    model, parameters = training.model, list(training.model.parameters())
    training.run(*training.inputs).backward()
    with said("sees only the gradients of this rank; call fxsched.clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    with said("SGD.step(closure) calls the model while its weights are the parts"):
        torch.optim.SGD(parameters, 0.1).step(lambda: training.run(*training.inputs))
    with said("Adafactor steps the parts of a weight otherwise than the whole weight"):
        torch.optim.Adafactor(parameters, 0.1).step()
    matrices = [p for p in parameters if record_of(p).parts and p.dim() == 2]
    with said("Muon steps the parts of a weight otherwise than the whole"):
        torch.optim.Muon(matrices, 0.1).step()
    with said("which ranks have in 2 parts; save fxsched.full_state_dict(model)"):
        copy.deepcopy(matrices[0])
    with said("in 2 parts since an earlier call, and this call's plan can't cut it"):
        other = fxsched.backend(schedules.gpipe(2, 2))
        torch.compile(model, backend=other)(*training.inputs)
    with said("AveragedModel has no average of"):
        torch.optim.swa_utils.AveragedModel(model)
    print(f"rank {dist.get_rank()}: refused")


@contextmanager
def said(text: str) -> Iterator[None]:
    try:
        yield
    except PlanError as error:
        assert text in str(error), str(error)
    else:
        raise AssertionError(f"no error: {text}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    equal()
    updates(Path(sys.argv[1]))
    if dist.get_world_size() == 2:
        saved(Path(sys.argv[1]))
        loops()
        refused()
    dist.destroy_process_group()
