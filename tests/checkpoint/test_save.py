"""fxsched.save and fxsched.load."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

import fxsched
from fxsched import PlanError, schedules
from fxsched.checkpoint.cut_weights import Whole
from fxsched.checkpoint.part import Part
from fxsched.checkpoint.save import _check_parts
from fxsched.checkpoint.values import random_state, set_random_state
from tests import elastic
from tests.devices import find_devices
from tests.ranks_save import Loader, Training, full_disk, resumed
from tests.resumes import resume
from tests.torchrun import ONE_THREAD, ROOT, torchrun

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def by_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A checkpoint of two ranks under fsdp, of which one is killed later on and which
    torchrun restarts under 1f1b; and what they printed."""
    folder = tmp_path_factory.mktemp("saved")
    done = torchrun(2, "tests.ranks_save", str(folder), restarts=1)
    return folder, done.stdout


@pytest.mark.slow
def test_killed_ranks_of_fsdp_resume_under_1f1b_and_on_threads_to_the_bit(
    by_ranks: tuple[Path, str],
) -> None:
    folder, printed = by_ranks
    wanted = re.findall(r"rank \d: (\(.*?\))", printed)
    found = resumed(folder, schedules.gpipe(3, 2))
    assert wanted == [str(found)] * 4, printed


@pytest.mark.slow
def test_ranks_killed_in_an_epoch_resume_with_as_many_and_with_one_fewer(
    tmp_path: Path,
) -> None:
    wanted, found = elastic.story(tmp_path)
    assert found == wanted and len(set(found)) == elastic.STEPS


@pytest.mark.slow
def test_a_model_built_without_memory_on_ranks_trains_like_one_built_as_ever(
    by_ranks: tuple[Path, str],
) -> None:
    training = Training.of(schedules.gpipe(3, 2), 0)
    torch.manual_seed(5)
    losses = training.steps(5)
    assert str((losses[3:], training.digest())) in by_ranks[1]


@pytest.mark.slow
def test_what_ranks_have_apart_is_not_shared_out(by_ranks: tuple[Path, str]) -> None:
    folder, _ = by_ranks
    training = Training.of(schedules.gpipe(2, 2), 1)
    assert training.load(folder) == {"step": 3, "seed": 4}  # and no "mine"
    extra = {"mine": Loader()}
    with pytest.raises(
        PlanError,
        match=r"extra\['mine'\] was saved with a different value on each of 2 r",
    ):
        fxsched.load(folder, training.model, extra=extra)


@pytest.mark.slow
def test_ranks_killed_while_they_save_leave_a_checkpoint_that_loads() -> None:
    command = [sys.executable, "-m", "tests.kill_saves", "--runs", "2", "--seed", "1"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | ONE_THREAD, capture_output=True, text=True
    )
    assert "killed 2 times, " in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("case", ["pipemare", "local_sgd with outer="])
def test_a_schedule_with_state_of_its_own_resumes_to_the_bit(
    tmp_path: Path, case: str
) -> None:
    wanted, found = resume(tmp_path, case)
    assert wanted == found


def test_parts_that_the_first_rank_does_not_see_are_no_checkpoint(
    tmp_path: Path,
) -> None:
    part = Part.of(nn.Linear(2, 2), None, None, 0, Whole({}, {})).write(tmp_path)
    there = {name: file for name, file in part.files.items() if "own" not in name}
    (tmp_path / "rank-0/own.pt").unlink()
    with pytest.raises(PlanError, match=r"rank 0 doesn't see .*own.pt, which rank 1 h"):
        _check_parts(tmp_path, [part._replace(files=there), part])


SCHEDULERS: list[Callable[[torch.optim.Optimizer], LRScheduler]] = [
    lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
    lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4]),
    lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1),
    lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 2)],
        [3],
    ),
]


@pytest.mark.parametrize("make", SCHEDULERS)
def test_learning_rates_go_on(
    make: Callable[[torch.optim.Optimizer], LRScheduler], tmp_path: Path
) -> None:
    model = nn.Linear(2, 2)

    def rates(scheduler: LRScheduler) -> list[float]:
        scheduler.optimizer.step()
        scheduler.step()
        return [scheduler.optimizer.param_groups[0]["lr"]]

    def scheduled() -> LRScheduler:
        return make(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    first, second = scheduled(), scheduled()
    rates(first), rates(first)
    fxsched.save(tmp_path, model, first.optimizer, extra={"scheduler": first})
    wanted = [rates(first) for _ in range(3)]
    fxsched.load(tmp_path, model, second.optimizer, extra={"scheduler": second})
    assert [rates(second) for _ in range(3)] == wanted


class Net(nn.Module):
    def __init__(self, width: int = 4, tied: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.calls = 0
        if tied:
            self.second.weight = self.first.weight
        self.register_buffer("shift", torch.randn(width))

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def trained(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """An optimizer of some parameters, after a step."""
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Net]:
    """A checkpoint of a plain model, and that."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("plain")
    model = Net()
    model.calls = 12
    fxsched.save(folder, model, trained(model, lr=0.02), extra={"loader": Loader()})
    return folder, model


def test_a_plain_model_comes_back_with_its_extra_state(plain: tuple[Path, Net]) -> None:
    folder, model = plain
    other = Net()
    before = torch.get_rng_state()
    optimizer = trained(other)
    assert not torch.equal(before, torch.get_rng_state())
    loaded = fxsched.load(folder, other, optimizer)["loader"]
    assert str(loaded) == str(Loader().state_dict())
    wanted = model.state_dict()
    assert other.calls == 12 and optimizer.param_groups[0]["lr"] == 0.02
    torch.testing.assert_close(other.state_dict(), wanted, rtol=0, atol=0)
    apart = Net(tied=False)
    fxsched.load(folder, apart)
    torch.testing.assert_close(apart.state_dict(), wanted, rtol=0, atol=0)


def test_random_numbers_go_on(tmp_path: Path) -> None:
    fxsched.save(tmp_path, nn.ReLU())
    wanted = torch.rand(3)
    fxsched.load(tmp_path, nn.ReLU())
    assert torch.equal(torch.rand(3), wanted)


def test_groups_of_the_optimizer_may_be_others_of_equal_options(tmp_path: Path) -> None:
    model = Net(tied=False)
    groups: list[dict[str, Any]] = [
        {"params": model.first.parameters(), "lr": 0.5},
        {"params": model.second.parameters()},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    model.first.weight.grad = torch.ones(4, 4)
    optimizer.step()
    fxsched.save(tmp_path, model, optimizer)
    halves = [[each.weight, each.bias] for each in (model.second, model.first)]
    apart = torch.optim.SGD([{"params": half} for half in halves], lr=7)
    fxsched.load(tmp_path, model, apart)
    assert [group["lr"] for group in apart.param_groups] == [0.1, 0.5]
    assert torch.equal(
        apart.state[model.first.weight]["momentum_buffer"], torch.ones(4, 4)
    )
    together = torch.optim.SGD(model.parameters(), lr=7)
    with pytest.raises(PlanError, match="saved with different values of lr; make"):
        fxsched.load(tmp_path, model, together)


def test_states_keep_more_bits_than_their_parameters(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    optimizer = trained(model)
    state = optimizer.state[model.weight]
    state["exp_avg"] = torch.full((2, 2), 1 / 3)
    fxsched.save(tmp_path, model, optimizer)
    again = trained(model)
    fxsched.load(tmp_path, model, again)
    assert torch.equal(again.state[model.weight]["exp_avg"], state["exp_avg"])


def test_each_save_is_a_fresh_folder_and_the_last_is_loaded(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for number in (1, 2):
        nn.init.constant_(model.weight, number)
        assert fxsched.save(tmp_path, model) == tmp_path / f"00000{number}"
    fxsched.load(tmp_path / "000001", model)
    assert model.weight[0, 0] == 1
    fxsched.load(tmp_path, model)
    assert model.weight[0, 0] == 2


@pytest.mark.parametrize(
    "name",
    ["part.write_tensors", "part.write_values", "save.write_values", "save.point_to"],
)
def test_a_save_that_fails_leaves_the_one_before(name: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    fxsched.save(tmp_path, model)
    wanted = model.weight.detach().clone()
    nn.init.zeros_(model.weight)
    with full_disk(name), pytest.raises(OSError, match="No space left"):
        fxsched.save(tmp_path, model)
    fxsched.load(tmp_path, model)
    assert torch.equal(model.weight, wanted)


def test_a_save_in_the_background_is_of_when_it_was_asked_for(tmp_path: Path) -> None:
    model = Net()
    optimizer, kept = trained(model), torch.ones(2)
    wanted = {
        name: value.clone()
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    moment = optimizer.state[model.first.weight]["exp_avg"].clone()
    saving = fxsched.save(
        tmp_path, model, optimizer, extra={"kept": kept}, background=True
    )
    with torch.no_grad():
        for value in (*model.state_dict().values(), kept):
            if isinstance(value, torch.Tensor):
                value.zero_()
        optimizer.state[model.first.weight]["exp_avg"].zero_()
    rest = fxsched.load(tmp_path, model, optimizer)  # which waits for it
    assert saving.done and saving.wait() == saving.folder == tmp_path / "000001"
    assert torch.equal(rest["kept"], torch.ones(2))
    for name, value in wanted.items():
        assert torch.equal(model.state_dict()[name], value), name
    assert torch.equal(optimizer.state[model.first.weight]["exp_avg"], moment)


def test_a_save_that_fails_in_the_background_is_an_error_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(2, 2)
    for collect in (None, fxsched.Saving.wait):
        with full_disk("part.write_tensors"):
            saving = fxsched.save(tmp_path, model, background=True)
            threads = [t for t in threading.enumerate() if t.name == "fxsched save"]
            for thread in threads:
                thread.join()
        line = "fxsched: a save in the background failed: OSError: [Errno 28] No space"
        assert line in capfd.readouterr().err
        with pytest.raises(OSError, match="No space"):
            collect(saving) if collect else fxsched.save(tmp_path, model)
        fxsched.save(tmp_path, model)
    fxsched.load(tmp_path, model)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("rank-0/__0_0.distcp", flip, r"__0_0.distcp is damaged: its checksum is \w+, and"),
    ("rank-0/__0_0.distcp", cut, r"__0_0.distcp is damaged: it has [\d,]+ bytes, and"),
    ("rank-0/.metadata", flip, r"rank-0/.metadata is damaged"),
    ("rank-0/own.pt", flip, "own.pt is damaged: its checksum"),
    (
        "common.pt",
        Path.unlink,
        "common.pt can't be read .No such file or dir.*: 000001",
    ),
    ("manifest.json", flip, "manifest.json is damaged, .* by its folder: 000001$"),
    ("manifest.json", cut, "manifest.json is damaged, "),
    (
        "manifest.json",
        Path.unlink,
        "the file 'latest' in this folder names no checkpoint",
    ),
    (
        "../latest",
        cut,
        "the file 'latest' in this folder names no checkpoint; give a numbered",
    ),
    ("../latest", Path.unlink, "this folder has no file 'latest'"),
    ("../latest", lambda path: path.write_bytes(b"\xff"), "names no checkpoint"),
    ("../latest", lambda path: path.write_text("../other"), "names no checkpoint"),
]


@pytest.mark.parametrize(("name", "damage", "text"), DAMAGES)
def test_damage_is_an_error_before_anything_is_changed(
    name: str, damage: Callable[[Path], object], text: str, tmp_path: Path
) -> None:
    model = nn.Linear(2, 2)
    fxsched.save(tmp_path, model)
    folder = fxsched.save(tmp_path, model)
    damage(folder / name)
    nn.init.zeros_(model.weight)
    before = torch.get_rng_state()
    with pytest.raises(PlanError, match=text) as error:
        fxsched.load(tmp_path, model)
    assert "\n" not in str(error.value)
    assert not model.weight.any() and torch.equal(before, torch.get_rng_state())


def test_a_manifest_that_leaves_a_file_out_is_damaged(tmp_path: Path) -> None:
    folder = fxsched.save(tmp_path, nn.Linear(2, 2))
    path = folder / "manifest.json"
    text = json.loads(path.read_text())
    del text["files"]["common.pt"]
    path.write_text(json.dumps(text))
    with pytest.raises(
        PlanError, match=r"damaged, or another ver.*wrote it; .* is none$"
    ):
        fxsched.load(tmp_path, nn.Linear(2, 2))


class Bigger(Net):
    def __init__(self) -> None:
        super().__init__()
        self.third, self.fourth = nn.Linear(2, 2), nn.Linear(2, 2)


def test_what_does_not_fit_is_an_error(plain: tuple[Path, Net]) -> None:
    folder, model = plain

    def refused(text: str, model: nn.Module, *others: Any, **options: Any) -> None:
        with pytest.raises(PlanError, match=f"^load: {text}") as error:
            fxsched.load(folder, model, *others, **options)
        assert "\n" not in str(error.value)

    small, head = Net(3), nn.Linear(4, 4)
    refused(r"shift was saved as float32\[4\], and this model has float32\[3\]", small)
    refused("shift was saved as float32.* and .* bfloat16", Net().bfloat16())
    refused("the checkpoint has no tensor third.weight.* more", Bigger())
    refused("the checkpoint has a tensor shift, which isn't", nn.Identity())
    refused("the checkpoint has no tensor weight, which is", head)
    sgd = torch.optim.SGD(model.parameters())
    refused("the checkpoint has the state of AdamW, not of SGD", model, sgd)
    few = torch.optim.AdamW(model.first.parameters())
    refused("the checkpoint has a parameter .*, second.bias, which isn't", model, few)
    refused(r"the checkpoint has no extra\['x'\]", model, extra={"x": sgd})
    refused(r"extra\['loader'\] is a int, without", model, extra={"loader": 1})


def test_what_was_saved_as_two_is_not_loaded_into_one(tmp_path: Path) -> None:
    fxsched.save(tmp_path, Net(tied=False))
    with pytest.raises(PlanError, match=r"second.weight and first.weight are one tens"):
        fxsched.load(tmp_path, Net())
    with pytest.raises(PlanError, match="the state of no optimizer, not of AdamW"):
        fxsched.load(tmp_path, model := Net(tied=False), trained(model))


class Hooked(nn.Linear):
    def _save_to_state_dict(self, destination: Any, *args: Any) -> None:
        super()._save_to_state_dict(destination, *args)
        destination["norm"] = self.weight.norm()


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(
        PlanError,
        match=r"extra\['f'\] has more than tensors.*those .has tests.*test_save.flip",
    ):
        fxsched.save(tmp_path, model, extra={"f": flip})
    with pytest.raises(PlanError, match="norm in the model's state_dict"):
        fxsched.save(tmp_path, Hooked(2, 2))
    with pytest.raises(PlanError, match="2 parameters that aren't in the model; give"):
        both = nn.ModuleList([model, nn.Linear(2, 2)])
        fxsched.save(tmp_path, model, torch.optim.SGD(both.parameters()))
    with pytest.raises(PlanError, match=r"optimizer= is a Loader, not a .*; give"):
        fxsched.save(tmp_path, model, Loader())  # type: ignore[arg-type]
    assert not any(tmp_path.iterdir())


def test_older_checkpoints_are_removed_once_a_new_one_is_whole(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    (tmp_path / "000001").mkdir(parents=True)  # of a save that was killed
    for _ in range(4):
        fxsched.save(tmp_path, model, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000004", "000005", "latest"]
    fxsched.save(tmp_path, model)
    assert len(list(tmp_path.iterdir())) == 4
    fxsched.save(tmp_path, model, background=True, keep=1).wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000007", "latest"]
    fxsched.load(tmp_path, model)
    with pytest.raises(PlanError, match=r"save\(keep=0\): give a number from 1 on"):
        fxsched.save(tmp_path, model, keep=0)


def test_all_random_generators_go_on_where_they_were(tmp_path: Path) -> None:
    def draw() -> tuple[float, ...]:
        return random.gauss(), float(np.random.randn()), float(torch.randn(()))

    draw()
    fxsched.save(tmp_path, model := nn.Linear(2, 2))
    wanted = draw()
    fxsched.load(tmp_path, model)
    assert draw() == wanted


def test_generators_of_devices_are_saved_once_they_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And set again on as many devices of the kind as there are."""
    assert random_state().keys() == {"cpu", "python", "numpy"}
    devices = find_devices(monkeypatch, "xpu", 2)
    saved, before = random_state(), devices.states()
    assert all(map(torch.equal, saved["xpu"], before))
    for generator in devices.generators:
        generator.manual_seed(9)
    set_random_state(saved)
    assert all(map(torch.equal, devices.states(), before))
    other = find_devices(monkeypatch, "cuda", 1)
    other.generators[0].manual_seed(9)
    (drawn,) = other.states()
    set_random_state(saved)
    assert torch.equal(other.states()[0], drawn)
    other.used = False
    assert random_state().keys() == {"cpu", "python", "numpy"}
