"""fxsched.save_weights and fxsched.load_weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fxsched
from fxsched import PlanError


class Tied(nn.Module):
    """Two names of a weight, a view of a buffer, a number."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(3, 3, dtype=dtype) for _ in range(2))
        self.second.weight = self.first.weight
        table = torch.randn(6, 2)
        self.register_buffer("table", table)
        self.register_buffer("upper", table[:3])
        self.register_buffer("count", torch.tensor(7))


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    wanted = other.state_dict()
    torch.testing.assert_close(model.state_dict(), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_go_through_safetensors_and_plain_pytorch_reads_them(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = Tied(dtype)
    compiled: Any = torch.compile(model, backend="eager")
    fxsched.save_weights(tmp_path, compiled)
    (file,) = tmp_path.iterdir()
    assert file.name == "model.safetensors"
    plain = Tied(dtype)
    plain.load_state_dict(load_file(file))
    assert_equal(plain, model)
    for path in (tmp_path, file):
        fxsched.load_weights(path, again := Tied(dtype))
        assert_equal(again, model)


def test_a_plain_state_dict_is_loaded(tmp_path: Path) -> None:
    model, again = Tied(), Tied()
    state = {f"_orig_mod.{name}": value for name, value in model.state_dict().items()}
    torch.save(state, tmp_path / "model.pt")
    fxsched.load_weights(tmp_path / "model.pt", again)
    assert_equal(again, model)


def test_files_of_an_index_are_loaded_and_tied_weights_need_one_name(
    tmp_path: Path,
) -> None:
    model, again = Tied(), Tied()
    state = model.state_dict() | {"upper": model.table[:3].clone()}
    del state["first.weight"]
    halves = {"a.safetensors": list(state)[:2], "b.safetensors": list(state)[2:]}
    for file, names in halves.items():
        save_file({name: state[name] for name in names}, tmp_path / file)
    file_of = {name: file for file, names in halves.items() for name in names}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": file_of}))
    fxsched.load_weights(tmp_path, again)
    assert_equal(again, model)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(
        PlanError, match=r"names 'b.safetensors', which isn't in the same folder"
    ):
        fxsched.load_weights(tmp_path, again)


def test_what_does_not_fit_or_is_damaged_is_an_error(tmp_path: Path) -> None:
    model = Tied()
    fxsched.save_weights(tmp_path, model)
    file = tmp_path / "model.safetensors"
    with pytest.raises(
        PlanError, match=r"model.safetensors exists already, .*; give a"
    ):
        fxsched.save_weights(tmp_path, model)
    with pytest.raises(PlanError, match=r"saved as float32.*, and this model has bflo"):
        fxsched.load_weights(file, Tied(torch.bfloat16))
    with pytest.raises(PlanError, match=r"has a tensor count, which isn't .*4 more"):
        fxsched.load_weights(file, nn.ModuleDict({"first": model.first}))
    state = load_file(file)
    save_file(state | {"second.weight": torch.zeros(3, 3)}, tmp_path / "two")
    (tmp_path / "two").rename(tmp_path / "two.safetensors")
    with pytest.raises(PlanError, match=r"second.weight and first.weight are one tens"):
        fxsched.load_weights(tmp_path / "two.safetensors", model)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(PlanError, match=r"damaged, or has more .*SafetensorError"):
        fxsched.load_weights(file, model)
    with pytest.raises(PlanError, match=r"there is no .*missing; give a file, or a"):
        fxsched.load_weights(tmp_path / "missing", model)
    for what, text in (
        (model, "damaged, or has more than weights"),
        ([1], "list; give"),
        ({"a": 1}, "'a'"),
    ):
        torch.save(what, tmp_path / "model.pt")
        with pytest.raises(PlanError, match=text) as error:
            fxsched.load_weights(tmp_path / "model.pt", model)
        assert "\n" not in str(error.value)


def test_a_state_that_is_no_tensor_is_not_for_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counts(nn.Linear):
        def get_extra_state(self) -> int:
            return 1

    with pytest.raises(
        PlanError, match=r"the model has 0._extra_state, from get_extra_"
    ):
        fxsched.save_weights(tmp_path, nn.Sequential(Counts(2, 2)))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(PlanError, match=r"safetensors isn't installed; pip install"):
        fxsched.save_weights(tmp_path, nn.Linear(2, 2))
