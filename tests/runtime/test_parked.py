"""Activations that wait for B on disk or on another worker."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import fxsched
from fxsched import PlanError, load_schedule, schedules
from fxsched.ir import ops, parked
from fxsched.jobs.job import Direction, Job

F, B = Direction.FORWARD, Direction.BACKWARD


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4))
    return nn.Sequential(*layers)


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def step(schedule: fxsched.Schedule, **options: object) -> fxsched.Plan:
    """A step; equal to eager's."""
    torch._dynamo.reset()
    mine, other, x = Loss(), Loss(), torch.randn(16, 16)
    with fxsched.backend(schedule, **options) as backend:
        torch.compile(mine, backend=backend)(x).backward()
    other(x).backward()
    for one, two in zip(mine.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)
    assert backend.plan is not None
    return backend.plan


def opened() -> list[str]:
    """The files that this process has open and that have no name."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(each))
        except OSError:
            continue
    return [name for name in found if name.endswith("(deleted)")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the process's file, which is opened anew."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    parked._file.cache_clear()
    yield tmp_path
    parked._file.cache_clear()


def test_views_of_one_memory_are_written_once_and_share_it_again(folder: Path) -> None:
    base = torch.arange(4096.0)
    views = (base[8:72].view(8, 8).t(), base[40:].view(-1, 2), base[:0], base[::7])
    other = torch.randn(3, 5).to(torch.bfloat16)
    row = torch.ones(64)
    handle = ops.offload("disk", (5,), (*views, other, row))
    found = ops.reload(handle)
    assert parked._file(os.getpid()).end == 5 * parked.PAGE  # 4 of base, 1 of other
    for one, two in zip((*views, other), found, strict=False):
        assert torch.equal(one, two) and one.stride() == two.stride()
    assert found[0].untyped_storage()._cdata == found[3].untyped_storage()._cdata
    assert found[5] is row and not list(folder.iterdir())
    alone = ops.reload(ops.offload("disk", (), other))
    assert torch.equal(alone, other)


def test_places_in_the_file_are_used_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms, place = list[int](), parked._File.place

    def counted(file: parked._File, room: int) -> int:
        rooms.append(room)
        return place(file, room)

    monkeypatch.setattr(parked._File, "place", counted)
    schedule = schedules.parked(schedules.gpipe(2, 4), "disk")
    for _ in range(4):  # in which workers may be further or less far apart
        step(schedule)
    assert 0 < parked._file(os.getpid()).end <= sum(rooms) / 4
    assert opened() and not list(folder.iterdir())


def test_a_plan_says_what_waits_and_what_workers_hold(folder: Path) -> None:
    plain = step(schedules.gpipe(2, 8))
    disk = step(schedules.parked(schedules.gpipe(2, 8), "disk"))
    away = step(schedules.parked(schedules.gpipe(2, 8), lambda s, b: 1 - s))
    held, kept, other = (
        [peaks.each.activations for peaks in plan.memory]
        for plan in (plain, disk, away)
    )
    assert kept[0] < 0.5 * held[0] and other[0] > 0.5 * held[0]
    assert disk.memory[0].disk > 0.7 * held[0] and not away.memory[0].disk
    assert re.search(r"activations wait .* on disk, at most: worker 0 ", str(disk))
    assert "on disk" in disk.explain() and "on disk" not in plain.explain()
    assert disk.simulate().latency > plain.simulate().latency
    assert disk.placements[Job(0, 3, F)].saved == "disk"
    assert disk.placements[Job(0, 3, B)].saved is None


def test_what_comes_back_at_once_stays(folder: Path) -> None:
    """The last stage of 1F1B runs B right after F."""
    plan = step(schedules.parked(schedules.one_f_one_b(2, 4), "disk"))
    stages = {op.task for op in plan.step.ops if op.target is ops.offload}
    assert stages and all(task.startswith("offload 0F") for task in stages)


def test_arithmetic_on_schedules_keeps_places(tmp_path: Path) -> None:
    base = schedules.parked(schedules.gpipe(2, 2), lambda s, b: 1 - s)
    two = schedules.replicate(base, 2)
    assert [two.place(Job(0, b, F)).saved for b in range(4)] == [1, 3, 1, 3]
    cut = schedules.sharded(base, 2)
    assert [cut.place(Job(1, 0, F), p).saved for p in range(2)] == [0, 1]
    base = schedules.parked(schedules.gpipe(2, 2), lambda s, b: "disk" if b else 1)
    base.save(tmp_path / "schedule.json")
    loaded = load_schedule(tmp_path / "schedule.json")
    jobs = [Job(s, b, d) for s in range(2) for b in range(2) for d in (F, B)]
    assert [loaded.place(job) for job in jobs] == [base.place(job) for job in jobs]
    with pytest.raises(PlanError, match=r"parked\(where='tape'\): give 'disk', 'host'"):
        schedules.parked(base, "tape")


def test_a_folder_that_cannot_be_written_to_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(folder / "none"))
    with pytest.raises(
        PlanError, match=r"no file can be opened in .*none: No such file"
    ):
        step(schedules.parked(schedules.gpipe(2, 4), "disk"))


def test_a_full_file_system_is_named(folder: Path) -> None:
    """Here a limit of the file's size, which is told of in the same way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
    try:
        with pytest.raises(PlanError, match=f"file system of {folder} has no room"):
            step(schedules.parked(schedules.gpipe(2, 4), "disk"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


KILLED = """
import os, signal, sys, torch, fxsched
from fxsched import schedules
from tests.runtime.test_parked import Loss, opened

class Ends(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        return end(gradient)

@torch.library.custom_op("tests::ends", mutates_args=())
def end(x: torch.Tensor) -> torch.Tensor:
    assert any(name.startswith(os.environ["TMPDIR"]) for name in opened())
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("fails in B")

@end.register_fake
def _(x): return torch.empty_like(x)

class Fails(Loss):
    def forward(self, x): return Ends.apply(self.layers(x)).square().mean()

schedule = schedules.parked(schedules.gpipe(2, 4), "disk")
compiled = torch.compile(Fails(), backend=fxsched.backend(schedule))
compiled(torch.randn(16, 16)).backward()
"""


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_nothing_is_left_of_a_step_that_fails(how: str, tmp_path: Path) -> None:
    own = {"TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path.parent / "cache")}
    ran = subprocess.run(
        [sys.executable, "-c", KILLED, how],
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if how == "kill":
        assert ran.returncode == -signal.SIGKILL, ran.stderr
    else:
        assert ran.returncode == 1 and "fails in B" in ran.stderr, ran.stderr
    left = [each for each in tmp_path.rglob("*") if each.is_file()]
    assert not left
