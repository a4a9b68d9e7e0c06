"""What each rank of tests/transport/test_torchrun.py does: python -m tests.ranks CASE
.."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef

import fxsched
from fxsched import CheckError, PlanError, schedules
from fxsched.ir import ops
from fxsched.schedules import parked
from fxsched.transport.processes import ProcessEndpoint
from fxsched.transport.wire_format import Parcel
from fxsched.transport.world import from_rank_0
from tests.cases import (
    MICROBATCHES,
    anything,
    apart,
    assert_equal,
    build,
    eager_step,
    train,
)


def replicated() -> fxsched.Schedule:
    """Zero bubble, data-parallel: a pipeline of one worker on each rank."""
    return schedules.replicate(schedules.zb_h1(1, MICROBATCHES // 2), 2)


def waits(s: int, b: int) -> int | str | None:
    """Where activations wait: on disk, on a worker, or on the one that runs B."""
    return (0, "disk", 1, None)[(s + b) % 4]


CASES = {  # by how many ranks there are
    2: ("equal", "replicas", "profiled", "slots", "world", "contract"),
    4: ("equal", "memory"),
}
EVERY_RANK = {
    2: lambda: [
        ("mlp", schedules.ddp(2, MICROBATCHES), "static", "sgd", "gloo"),
        ("two_tower", schedules.one_f_one_b(2, MICROBATCHES), "static", "adamw"),
        ("two_tower", anything(5, 2), "dynamic", "sgd"),
        ("mlp", anything(5, 2), "dynamic", "sgd", "gloo"),
        ("unet", schedules.fslpp(2, 1, MICROBATCHES, stages=4), "static", "adamw"),
        ("two_tower", replicated(), "static", "sgd", "gloo"),
        ("gpt", parked(schedules.gpipe(2, MICROBATCHES), "disk"), "static", "adamw"),
        ("unet", parked(anything(5, 2), waits), "static", "sgd"),
        ("two_tower", parked(anything(5, 2), waits), "dynamic", "sgd"),
        ("unet", parked(schedules.zb_h1(2, 4), waits), "static", "sgd", "gloo"),
    ],
    4: lambda: [
        ("mlp", schedules.fsdp(4), "dynamic", "adamw"),
        ("gpt", schedules.gpipe(4, MICROBATCHES), "static", "adamw"),
        ("encoder_decoder", schedules.lpp(4, 2, MICROBATCHES), "dynamic", "sgd"),
        ("two_tower", apart(4), "static", "adamw"),
        ("gpt", schedules.zb_h1(4, MICROBATCHES), "static", "adamw"),
        ("mlp", schedules.zb_v(4, MICROBATCHES), "dynamic", "sgd"),
        ("mlp", schedules.cuckoo(4, 8), "static", "sgd"),
    ],
}


def equal() -> None:
    for name, schedule, order, optimizer, *over in EVERY_RANK[dist.get_world_size()]():
        model, inputs = build(name)
        reference = copy.deepcopy(model)
        wanted = train(
            reference,
            lambda m=reference, x=inputs, s=schedule: eager_step(m, x, s.microbatches),
            optimizer,
        )
        transport = over[0] if over else None
        backend = fxsched.backend(schedule, order=order, transport=transport)
        run = torch.compile(model, backend=backend)

        def step(run=run, inputs=inputs) -> Tensor:
            loss = run(*inputs)
            loss.backward()
            return loss

        found = train(model, step, optimizer)
        mine = {n for n, gradient in found.gradients.items() if gradient is not None}
        assert_equal(found, wanted, mine)
        everyone: list[set[str]] = [set()] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        assert set.union(*everyone) == set(wanted.gradients)
        print(f"rank {dist.get_rank()} {name} {schedule.name}: equal to eager")


def held(tensors: list[Tensor]) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)


class Slots:
    """Counts the bytes of weights that a rank has asked for and still holds."""

    def __init__(self) -> None:
        self.asked: dict[int, int] = {}  # bytes of fetches that have not been taken
        self.here: list[tuple[StorageWeakRef, int]] = []
        self.peak = 0
        self.parcels: dict[int, int] = {}  # bytes of each fetch
        expected, taken = ProcessEndpoint.expect, ProcessEndpoint.take

        def expect(endpoint: ProcessEndpoint, parcel: Parcel) -> None:
            if parcel.weights:
                size = sum(spec.bytes for spec in parcel.specs)
                self.parcels[parcel.tag] = self.asked[parcel.tag] = size
                self.look()
            expected(endpoint, parcel)

        def take(endpoint: ProcessEndpoint, parcel: Parcel) -> Any:
            value = taken(endpoint, parcel)
            if parcel.weights:
                tensors = value if parcel.bundle else (value,)
                storages = (t.untyped_storage() for t in tensors)
                unique = {storage.data_ptr(): storage for storage in storages}
                self.add(parcel.tag, [*unique.values()])
            return value

        ProcessEndpoint.expect, ProcessEndpoint.take = expect, take

    def add(self, tag: int, storages: list[torch.UntypedStorage]) -> None:
        """Weights that came in these storages."""
        size = self.asked.pop(tag) / len(storages)
        self.here += [(StorageWeakRef(storage), size) for storage in storages]
        self.look()

    def look(self) -> None:
        self.here = [each for each in self.here if not each[0].expired()]
        now = sum(size for _, size in self.here) + sum(self.asked.values())
        self.peak = max(self.peak, now)


def slots() -> None:
    """A rank never holds more weights of others than those of prefetch + 1 jobs."""
    counted = Slots()
    for schedule in (
        schedules.fslpp(2, 1, MICROBATCHES, stages=6),
        schedules.fsdp(2, MICROBATCHES),
    ):
        for prefetch, order, transport in (
            (0, "static", "distributed"),
            (1, "static", "distributed"),
            (1, "static", "gloo"),
            (2, "static", "distributed"),
            (1, "dynamic", "distributed"),
            (1, "dynamic", "gloo"),
        ):
            model = nn.Sequential(*(nn.Linear(192, 192) for _ in range(6)))
            backend = fxsched.backend(
                schedule,
                list("12345"),
                order=order,
                prefetch=prefetch,
                transport=transport,
            )
            run = torch.compile(model, backend=backend)
            torch.manual_seed(0)
            x = torch.randn(2 * MICROBATCHES, 192)
            run(x).sum().backward()
            counted.peak = 0
            counted.parcels.clear()
            run(x).sum().backward()
            limit = (prefetch + 1) * max(counted.parcels.values())
            assert len(counted.parcels) > 4, (schedule.name, counted.parcels)
            assert counted.peak <= limit, (
                schedule.name,
                prefetch,
                order,
                transport,
                counted.peak,
                limit,
            )
            if order == "static":
                assert counted.peak == limit, (schedule.name, prefetch, counted.peak)
    print("no more weights than asked for")


def memory() -> None:
    for name in ("two_tower", "gpt"):  # gpt has a tied parameter
        model, inputs = build(name)
        parameters = list(model.parameters())
        numbers = sum(p.nbytes for p in parameters)
        backend = fxsched.backend(schedules.fslpp(4, 2, MICROBATCHES, even=True))
        run = torch.compile(model, backend=backend)
        update = torch.optim.AdamW(parameters)
        for _ in range(2):
            update.zero_grad()
            run(*inputs).backward()
            update.step()
        moments = [
            s[k] for s in update.state.values() for k in ("exp_avg", "exp_avg_sq")
        ]
        given_up = [p for p in parameters if p.grad is None]
        assert all(p.untyped_storage().nbytes() == p.element_size() for p in given_up)
        kept = [p for p in parameters if p.grad is not None]
        counts = torch.tensor([held(kept), held(moments)])
        dist.all_reduce(counts)
        assert counts.tolist() == [numbers, 2 * numbers], (name, counts, numbers)
    if dist.get_rank() == 0:
        print("one model between 4 ranks")


def replicas() -> None:
    model, inputs = build("mlp")
    if dist.get_rank():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
    wanted = copy.deepcopy(build("mlp")[0])
    run = torch.compile(model, backend=fxsched.backend(schedules.ddp(2, MICROBATCHES)))
    update = torch.optim.AdamW(model.parameters())
    first = run(*inputs)
    torch.testing.assert_close(first.detach(), wanted(*inputs).detach())
    first.backward()
    update.step()
    for parameter in model.parameters():
        copies = [torch.empty_like(parameter) for _ in range(2)]
        dist.all_gather(copies, parameter.detach())
        assert torch.equal(copies[0], copies[1])
    dist.barrier()  # gloo's threads have let go of these tensors before Python ends
    if dist.get_rank() == 0:
        print("same bits on 2 ranks")


class Logits(nn.Module):
    """No scalar loss, a BatchNorm, and an output that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> dict[str, Tensor | None]:
        logits = self.second(torch.tanh(self.norm(self.first(x))))
        return {"logits": logits, "nothing": None, "best": logits.argmax(1)}


def contract() -> None:
    torch.manual_seed(3)
    model, x = Logits(), torch.randn(8, 16, requires_grad=True)
    reference, y = copy.deepcopy(model), x.detach().clone().requires_grad_()
    written = []

    def note(program: fx.GraphModule, request: object) -> fx.GraphModule:
        written.append(program)
        return program

    backend = fxsched.backend(schedules.gpipe(2, 4), passes=[note])
    run = torch.compile(model, backend=backend)
    run(x)["logits"].pow(2).sum().backward()
    reference(y)["logits"].pow(2).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    for mine, other in pairs:
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)
    for evaluation in (model, reference):
        evaluation.eval()
    with torch.no_grad():  # a new batch size, forward only, with the new statistics
        z = torch.randn(12, 16)
        found, wanted = run(z), reference(z)
        torch.testing.assert_close(found["logits"], wanted["logits"])
        assert torch.equal(found["best"], wanted["best"])
        assert found["nothing"] is None
    assert len(written) == 2  # of each plan, a rank's own program
    print(f"rank {dist.get_rank()}: contract holds")
    refusals()


def refusals() -> None:
    """What is wrong on rank 1 alone is an error on both ranks."""
    rank = dist.get_rank()

    def drop(program: fx.GraphModule, request: object) -> fx.GraphModule:
        for send in program.graph.find_nodes(op="call_function", target=ops.send):
            program.graph.erase_node(send)
        return program

    def fail(program: fx.GraphModule, request: object) -> fx.GraphModule:
        raise ZeroDivisionError("of rank 1")

    for count, own in ((4, [drop]), (4, [fail]), (2 + 2 * rank, [])):
        torch._dynamo.reset()
        schedule = schedules.gpipe(2, count)
        backend = fxsched.backend(schedule, passes=own * rank)
        try:
            torch.compile(Logits(), backend=backend)(torch.ones(8, 16))
        except (CheckError, PlanError, ZeroDivisionError) as error:
            print(f"rank {rank}: {type(error).__name__}: {error}")


def profiled() -> None:
    model, inputs = build("two_tower")
    reference = copy.deepcopy(model)
    eager_step(reference, inputs, MICROBATCHES)
    profile = fxsched.profile(model, *inputs, microbatches=MICROBATCHES, repeats=1)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, profile)
    assert everyone[0] == everyone[1] and profile.measured
    schedule = schedules.graph(2, MICROBATCHES)
    backend = fxsched.backend(schedule, profile=profile)
    run = torch.compile(model, backend=backend)
    run(*inputs).backward()
    ran, found = backend.timeline, backend.plan.simulate().timeline
    for worker in range(2):  # on every rank, the jobs of all
        jobs = [event.job for event in ran if event.worker == worker]
        assert jobs == [event.job for event in found if event.worker == worker]
    assert all(event.start <= event.end for event in ran)
    dist.all_gather_object(everyone, ran)
    assert everyone[0] == everyone[1]
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    for mine, other in pairs:
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)
    again = fxsched.profile(model, *inputs, microbatches=MICROBATCHES, repeats=1)
    assert again.measured.keys() == profile.measured.keys()
    try:
        fxsched.profile(Fixed(), inputs[0].float(), microbatches=MICROBATCHES)
    except PlanError as error:
        print(f"rank {dist.get_rank()}: {str(error)[:28]}")

    def fails() -> None:
        raise Twofold("one", "two")

    try:
        from_rank_0(fails)
    except PlanError as error:
        print(f"rank {dist.get_rank()}: {error}")


class Twofold(Exception):
    """Cannot be unpickled."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


class Fixed(nn.Module):
    """Fixes the batch size, so that it cannot be cut."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(8, -1).sum(1) * torch.ones(8)


def world() -> None:
    model, inputs = build("mlp")
    run = torch.compile(model, backend=fxsched.backend(schedules.ddp(4)))
    try:
        run(*inputs)
    except PlanError as error:
        print(f"rank {dist.get_rank()}: {error}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for case in sys.argv[1:]:
        torch._dynamo.reset()
        globals()[case]()
    dist.destroy_process_group()
