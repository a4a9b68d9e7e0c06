"""What each rank of tests/params/test_parameters.py does: python -m
tests.ranks_parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.testing import assert_close

import fxsched
from fxsched import Schedule, schedules
from tests.ranks_state import refused

Loss = Callable[[nn.Module, Tensor], Tensor]
Change = Callable[[nn.Module], object]
SCHEDULES = (schedules.one_f_one_b, schedules.fsdp, schedules.ddp)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 4)]
    return nn.Sequential(*layers)


def batch() -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def train(
    model: nn.Module, run: Any, loss_of: Loss, after: Change, between: Change
) -> Tensor:
    """Three steps; their losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(3):
        loss = loss_of(model, run(batch()).square().mean())
        loss.backward()
        after(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step == 0:
            between(model)
    return torch.stack(losses)


def same(schedule: Schedule, loss_of: Loss, after: Change, between: Change) -> None:
    """Losses and parameters are eager's."""
    torch._dynamo.reset()
    model, whole = build(), build()
    torch.manual_seed(2)
    wanted = train(whole, whole, loss_of, after, between)
    torch.manual_seed(2)
    with fxsched.backend(schedule, stages=["2"]) as backend:
        run = torch.compile(model, backend=backend)
        assert_close(train(model, run, loss_of, after, between), wanted)
        assert_close(dict(fxsched.full_state_dict(model)), dict(whole.state_dict()))
        if schedule.name == "ddp":  # this rank has all of it
            assert_close(copy.deepcopy(model)(batch()), whole(batch()))
        draws: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(draws, torch.rand(()).item())
    assert len(set(draws)) == 1, "generators of all ranks are alike"


def penalty(model: nn.Module, loss: Tensor) -> Tensor:
    return loss + 0.1 * fxsched.parameter_sum(model, lambda name, p: p.square().sum())


def clip(model: nn.Module) -> None:
    """By a number of all gradients."""
    total = fxsched.parameter_sum(model, lambda name, p: p.grad.square().sum())
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.01 / total.sqrt())
            assert parameter.grad.norm().item() * 2.0 >= 0.0  # of one: no error


def renew(model: nn.Module) -> None:
    model.get_submodule("0").reset_parameters()  # type: ignore[operator]
    with torch.no_grad():
        for parameter in model.get_submodule("3").parameters():
            nn.init.trunc_normal_(parameter, std=0.1)


def hooks(schedule: Schedule, whole_batch: nn.Module) -> None:
    """Run where the gradient is, once a backward(), with that of the whole batch."""
    torch._dynamo.reset()
    model, called, done = build(), {}, []
    for name, parameter in model.named_parameters():

        def note(gradient: Tensor, name: str = name) -> Tensor:
            assert name not in called
            called[name] = gradient.clone()
            return gradient.clamp(-0.01, 0.01)

        parameter.register_hook(note)
        parameter.register_post_accumulate_grad_hook(lambda p: done.append(p.grad))
    with fxsched.backend(schedule, stages=["2"]) as backend:
        run = torch.compile(model, backend=backend)
        run(batch()).square().mean().backward()
        for name, parameter in model.named_parameters():
            assert (parameter.grad is not None) == (name in called)
            if name in called:
                wanted = whole_batch.get_parameter(name).grad
                assert wanted is not None
                assert_close(called[name], wanted)
                assert_close(parameter.grad.clone(), wanted.clamp(-0.01, 0.01))
        assert len(done) == len(called)
        owners: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(owners, list(called))
        assert {n for each in owners for n in each} == set(
            dict(model.named_parameters())
        )


def called_itself(model: nn.Module, run: Any, backend: fxsched.Backend) -> None:
    """The model that isn't compiled refuses to run; all else goes on as before."""
    plan = backend.plan
    refused(lambda: model(batch()), "call the compiled model, on every rank, or load")
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(batch()).shape == (8, 4)
    whole = build()
    whole.load_state_dict(fxsched.full_state_dict(model))
    with torch.no_grad():
        assert_close(run(batch()), whole(batch()))
    assert_close(run(batch()), whole(batch()))
    assert backend.plan is plan, "the hooks were there before the model was traced"


def by_all(model: nn.Module, which: Callable[[list[Tensor]], Any]) -> Any:
    return which([p.grad for p in model.parameters() if p.grad is not None])


class OneRate(torch.optim.SGD):
    """Its rate is a number of all gradients, as Prodigy's."""

    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        gradients = [p.grad for p in group["params"] if p.grad is not None]
        group["lr"] = 0.1 / (1 + float(nn.utils.get_total_norm(gradients)))
        return super().step(closure)


def refusals() -> None:
    """A number that would leave out what other ranks have is an error."""
    torch._dynamo.reset()
    model = build()
    backend = fxsched.backend(schedules.one_f_one_b(2, 2), stages=["2"])
    run = torch.compile(model, backend=backend)
    start = copy.deepcopy(list(model.parameters()))
    run(batch()).square().mean().backward()
    called_itself(model, run, backend)
    for norm in (
        lambda gradients: torch.stack([g.norm() for g in gradients]).norm(),
        lambda gradients: sum(g.square().sum() for g in gradients),
        lambda gradients: sum(g.norm().item() ** 2 for g in gradients) ** 0.5,
        lambda gradients: nn.utils.parameters_to_vector(gradients),
        lambda gradients: nn.utils.get_total_norm(gradients),
    ):
        refused(lambda: by_all(model, norm), "fxsched.gradient_norm(model), or for")  # noqa: B023
    refused(
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "torch.nn.utils.clip_grad_norm_ sees only the gradients of this rank; call",
    )
    refused(
        OneRate(model.parameters(), lr=0.1).step, "OneRate steps each parameter with n"
    )
    lbfgs = torch.optim.LBFGS(model.parameters())
    refused(lambda: lbfgs.step(lambda: run(batch()).sum()), "LBFGS steps each param")
    torch.optim.AdamW(model.parameters()).step()
    loss = run(batch()).square().mean()
    near = sum((p - q).square().sum() for p, q in zip(model.parameters(), start))  # noqa: B905
    refused((loss + near).backward, "the loss has a term outside of the model, but")


def main() -> None:
    whole = build()
    whole(batch()).square().mean().backward()
    for make in SCHEDULES:
        schedule = make(workers=2, microbatches=2)
        same(schedule, penalty, clip, renew)
        hooks(schedule, whole)
    refusals()
    print(f"rank {dist.get_rank()}: parameters hold", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
