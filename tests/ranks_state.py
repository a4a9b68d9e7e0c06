"""What each rank of tests/params/test_state.py does: python -m tests.ranks_state."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_  # before any rank gives anything up

import fxsched
from fxsched import PlanError, Schedule, schedules
from fxsched.params.released import is_given_up
from fxsched.transport.checksums import digest
from tests import ranks_views

B = 4


class Tied(nn.Module):
    """A tied weight, a frozen and an unused one, BatchNorm, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.norm = nn.BatchNorm1d(16)
        self.middle = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16))
        self.last = nn.BatchNorm1d(16, affine=False)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.randn(16))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.norm(self.frozen(self.embed(x).mean(1)))
        h = self.last(h + self.middle(h)) + self.shift
        return nn.functional.cross_entropy(self.head(h), y)


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    x = torch.randint(20, (8, 5), generator=draw)
    return x, torch.randint(20, (8,), generator=draw)


def build(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied()
    groups = [
        {"params": [*model.embed.parameters(), model.unused, *model.norm.parameters()]},
        {"params": [*model.middle.parameters()], "lr": 2e-3, "weight_decay": 0.1},
    ]
    return model, torch.optim.AdamW(groups, lr=1e-3, eps=1e-4)


def eager(model: nn.Module) -> Callable[..., None]:
    def step(x: Tensor, y: Tensor) -> None:
        for a, b in zip(x.chunk(B), y.chunk(B), strict=True):
            (model(a, b) / B).backward()

    return step


def planned(model: nn.Module, schedule: Schedule, **options: Any) -> Any:
    backend = fxsched.backend(schedule, batch_norm="microbatch", **options)
    run = torch.compile(model, backend=backend)
    return lambda x, y: run(x, y).backward()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: Any, numbers: range
) -> list[Tensor]:
    """Steps with clipping; the norms."""
    norms = []
    for number in numbers:
        optimizer.zero_grad()
        step(*batch(number))
        norms.append(fxsched.clip_grad_norm_(model, 0.3))
        optimizer.step()
    return norms


def everyone(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def assert_close(found: Any, wanted: Any) -> None:
    """Two states: same names, numbers and order, equal to float tolerance."""
    if isinstance(wanted, dict):
        assert list(found) == list(wanted), (list(found), list(wanted))
        for key in wanted:
            assert_close(found[key], wanted[key])
    elif isinstance(wanted, (list, tuple)):
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)
    elif isinstance(wanted, Tensor):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    else:
        assert found == wanted, (found, wanted)


def refused(call: Callable[[], object], words: str) -> None:
    try:
        call()
    except (PlanError, RuntimeError, TimeoutError) as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no error that says {words}")


def clip(schedule: Schedule) -> None:
    """The norm has the bits of torch's on all gradients in one process, everywhere."""
    model, _ = build()
    step = planned(model, schedule)
    for norm_type in (2.0, 1.0, 3.0, float("inf")):
        model.zero_grad()
        step(*batch(1))
        own = {
            n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }
        gradients = {name: g for each in everyone(own) for name, g in each.items()}
        whole, _ = build()
        for name, parameter in whole.named_parameters():
            parameter.grad = gradients.get(name)
        wanted = clip_grad_norm_(whole.parameters(), 0.1, norm_type)
        found = fxsched.clip_grad_norm_(model, 0.1, norm_type)
        assert torch.equal(found, wanted), (schedule.name, norm_type, found, wanted)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                assert torch.equal(parameter.grad, whole.get_parameter(name).grad)
    reference, _ = build()
    eager(reference)(*batch(1))
    step(*batch(1))
    found = fxsched.clip_grad_norm_(list(model.parameters()), 1.0, float("inf"))
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.fill_(torch.inf)
    refused(
        lambda: fxsched.clip_grad_norm_(model, 1.0, error_if_nonfinite=True),
        "of the gradients is inf, so they cannot be clipped; error_if_nonfinite=False",
    )


def guards(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What would skip or save values that are elsewhere is an error."""
    some = [p for p in model.parameters() if is_given_up(p)]
    assert some and not all(map(is_given_up, model.parameters()))
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    refused(lambda: clip_grad_norm_(model.parameters(), 0.3), "fxsched.clip_grad_norm_")
    own = [p for p in model.parameters() if p.grad is not None]
    refused(lambda: clip_grad_norm_(own, 0.3), "fxsched.clip_grad_norm_")
    refused(model.state_dict, "fxsched.full_state_dict(model)")
    if dist.get_rank() == 0:  # which has no part in this BatchNorm without weights
        refused(model.last.state_dict, "no values of last.running_mean, which rank 1")
    refused(lambda: torch.save(model, io.BytesIO()), "fxsched.full_state_dict(model)")
    refused(lambda: copy.deepcopy(model), "fxsched.full_state_dict(model)")
    refused(
        lambda: torch.save(model.state_dict(keep_vars=True), io.BytesIO()),
        "fxsched.full_state_dict(model)",
    )
    refused(optimizer.state_dict, "fxsched.full_optimizer_state_dict(model, optimizer)")
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, before, after))
    # of another model, torch's own is as it was
    other, _ = build()
    eager(other)(*batch(0))
    clip_grad_norm_(other.parameters(), 0.3)


def saved(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """What a file gives back."""
    file = io.BytesIO()
    state = {
        "model": fxsched.full_state_dict(model),
        "optimizer": fxsched.full_optimizer_state_dict(model, optimizer),
    }
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    return loaded["model"], loaded["optimizer"]


def resume() -> None:
    """Ranks -> plain -> ranks by another schedule -> threads, as eager goes on."""
    reference, its_optimizer = build()
    wanted = train(reference, its_optimizer, eager(reference), range(3))

    model, optimizer = build()
    step = planned(model, schedules.gpipe(2, B))
    found = train(model, optimizer, step, range(3))
    assert_close(found, wanted)
    guards(model, optimizer)
    state, moments = saved(model, optimizer)
    assert_close(state, reference.state_dict())
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    assert_close(moments, its_optimizer.state_dict())
    assert len({digest([s, m]) for s, m in everyone((state, moments))}) == 1
    guards(model, optimizer)  # as before
    wanted = train(reference, its_optimizer, eager(reference), range(3, 5))

    plain, its_own = build(1)
    plain.load_state_dict(state)
    its_own.load_state_dict(copy.deepcopy(moments))
    assert_close(train(plain, its_own, eager(plain), range(3, 5)), wanted)

    for schedule, options, steps in (
        (schedules.fslpp(2, 1, B), {}, 0),  # before the first call
        (schedules.ddp(2, B), {}, 1),  # after steps
        (schedules.gpipe(2, B), {"transport": "threads"}, 1),
    ):
        again, its_own = build(2)
        step = planned(again, schedule, **options)
        train(again, its_own, step, range(steps))
        compiled = torch.compile(again, backend="eager")  # names without _orig_mod
        fxsched.load_full_state_dict(compiled, state)
        fxsched.load_full_optimizer_state_dict(again, its_own, moments)
        assert_close(fxsched.full_state_dict(compiled), state)
        assert_close(train(again, its_own, step, range(3, 5)), wanted)
        state_after, moments_after = saved(again, its_own)
        assert_close(moments_after, its_optimizer.state_dict())
        exact = options  # else workers average BatchNorm's statistics
        wanted_after = {
            name: state_after[name] if "running_" in name and not exact else value
            for name, value in reference.state_dict().items()
        }
        assert_close(state_after, wanted_after)
    held = [p for p in its_own.state if is_given_up(p)]
    assert not held


def mistakes() -> None:
    rank = dist.get_rank()
    model, optimizer = build()
    step = planned(model, schedules.gpipe(2, B))
    train(model, optimizer, step, range(1))
    state = fxsched.full_state_dict(model)
    refused(lambda: model.load_state_dict(state), "fxsched.load_full_state_dict")
    calls = fxsched.full_state_dict, lambda m: fxsched.clip_grad_norm_(m, 1.0)
    refused(lambda: calls[rank](model), "every rank must call it")
    state["norm.bias"] += rank
    refused(lambda: fxsched.load_full_state_dict(model, state), "rank 1 loads another")
    assert fxsched.profile(model, *batch(0), microbatches=B, repeats=1).measured
    other, _ = build()
    refused(
        lambda: fxsched.full_optimizer_state_dict(other, optimizer), "none of the model"
    )
    refused(lambda: fxsched.full_state_dict(step), "give the model")
    threads = fxsched.backend(schedules.ddp(2, B), transport="threads")
    torch._dynamo.reset()
    run = torch.compile(model, backend=threads)
    refused(lambda: run(*batch(0)), "transport='distributed'")
    # another backend finds the parameters where they are
    torch._dynamo.reset()
    run = torch.compile(model, backend=fxsched.backend(schedules.fsdp(2, B)))
    reference, its_optimizer = build()
    train(reference, its_optimizer, eager(reference), range(1))
    model.eval(), reference.eval()
    with torch.no_grad():
        assert_close(run(*batch(0)), reference(*batch(0)))


def alone() -> None:
    """A rank that clips alone waits for the others no longer than it may."""
    model = Scaled()
    backend = fxsched.backend(schedules.gpipe(2, B), ["second"], timeout=4)
    torch.compile(model, backend=backend)(*draw(1)).backward()
    if dist.get_rank() == 0:
        refused(lambda: fxsched.clip_grad_norm_(model, 1.0), "clip_grad_norm_")
    dist.barrier()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        return (self.second(self.first(x).tanh()) - y * scale).pow(2).mean()


def draw(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(8, 4), torch.randn(8, 1), torch.randn(())


def inputs() -> None:
    """Ranks with different inputs are told so, or run on those of one."""
    rank, differs = dist.get_rank(), "rank 1 calls the model with other values of "

    def run(**options: Any) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = Scaled()
        backend = fxsched.backend(schedules.gpipe(2, B), ["second"], **options)
        return model, torch.compile(model, backend=backend)

    x, y, scale = draw(1)
    _, step = run(check_inputs="always")
    for mine, names in (
        (draw(2 + rank), "x, y, scale than rank 0"),
        ((x, y, scale + rank), "scale than"),  # the same for all microbatches
        ((x.flip(0) if rank else x, y, scale), "x than"),  # the same rows
    ):
        refused(lambda: step(*mine), differs + names)  # noqa: B023
    for _ in range(4):
        step(x, y, scale).backward()
    refused(lambda: step(x, y + rank, scale), "DistributedSampler")
    refused(lambda: step(x, y + rank, scale), "input_from=0")
    model, step = run()
    for _ in range(3):
        step(x, y, scale).backward()
    # by default only the first are compared as a whole, later ones by a few elements
    refused(lambda: step(x, y + rank, scale), "with other inputs than rank")
    _, step = run(check_inputs="never")
    step(x, y + rank, scale)
    source = 1
    model, step = run(input_from=source)
    for _ in range(2):
        model.zero_grad()
        wanted, mine = draw(source), draw(rank)
        draws = [wanted[0].clone().requires_grad_(), mine[0].requires_grad_()]
        reference = Scaled()
        reference.load_state_dict(fxsched.full_state_dict(model))
        loss = reference(draws[0], *wanted[1:])
        loss.backward()
        found = step(draws[1], *mine[1:])
        found.backward()
        torch.testing.assert_close(found, loss)
        assert_close(draws[1].grad, draws[0].grad)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                assert_close(parameter.grad, reference.get_parameter(name).grad)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    clip(schedules.ddp(2, B))
    clip(schedules.fslpp(2, 1, B))
    resume()
    mistakes()
    inputs()
    ranks_views.main()
    alone()
    print(f"rank {dist.get_rank()}: whole state")
    dist.destroy_process_group()
