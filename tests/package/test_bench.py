"""What the benchmarks race is the same model, however it is cut."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch

from fxsched.models.gpt import GPTConfig

from ..bench import choose, first, language, table, table_models, varying
from ..bench.sleep import tree
from ..bench.sleepers import WIDTH, Stretch, loss


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_line_of_blocks_is_the_tree(shape: str) -> None:
    torch.manual_seed(0)
    model = tree(shape, 8, 0.0)
    inputs = [torch.randn(4, WIDTH) for _ in range(model.branches)]
    model(*inputs).backward()
    wanted = [block.scale.grad.clone() for block in model.blocks]
    model.zero_grad()
    carried: tuple[torch.Tensor, ...] = ()
    for number in range(len(model.blocks)):
        named = {f"x{i}": x for i, x in enumerate(inputs)}
        made = Stretch(model, number)(*carried, **named)
        carried = made if isinstance(made, tuple) else (made,)
    loss(*carried).backward()
    for block, gradient in zip(model.blocks, wanted, strict=True):
        torch.testing.assert_close(block.scale.grad, gradient)


def test_a_tree_has_three_branches_and_a_head_of_equal_length() -> None:
    reads = list(tree("tree", 8, 0.0).reads())
    assert reads == [(), (0,), (), (2,), (), (4,), (1, 3, 5), (6,)]
    assert list(tree("chain", 3, 0.0).reads()) == [(), (0,), (1,)]


def test_parts_in_a_row_are_the_model() -> None:
    config = GPTConfig(vocabulary=8, length=4, width=8, layers=2)
    setup = language.Setup(config, 2, 1, False)
    line = setup.line()
    out = language.Stretch(line.parts)(**line.inputs)
    line.loss(out, line.target).backward()
    found = {name: p.grad for name, p in line.model.named_parameters()}
    torch.testing.assert_close(found, setup.gradients())


@pytest.mark.slow
@pytest.mark.parametrize("name", table.MODELS)
def test_a_model_of_the_table_is_the_same_for_a_pipeline(name: str) -> None:
    config = GPTConfig(vocabulary=8, length=4, width=8, layers=2)
    setup = language.Setup(config, 4, 1, False)
    make = {
        "nanogpt": table_models.language,
        "clip": table_models.clip,
        "encoders": table_models.three_encoders,
    }[name]
    model = make(setup)
    whole, line = model.make(), model.line()
    wanted = whole(*model.inputs.values())
    (out,) = _tuple(line.stage(line.parts)(**line.inputs))
    found = line.loss(out, line.target)
    torch.testing.assert_close(found, wanted)
    wanted.backward()
    found.backward()
    named = dict(line.model.named_parameters())
    for key, parameter in whole.named_parameters():
        torch.testing.assert_close(named[key].grad, parameter.grad)


def _tuple(value: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def test_the_table_goes_where_the_last_one_was(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n<!-- {table.COMMAND} -->\n\n<!-- end -->\nafter\n")
    for made in ("| a |", "| b |\n| c |"):
        table.write(page, made)
        assert page.read_text() == (
            f"before\n<!-- {table.COMMAND} -->\n{made}\n<!-- end -->\nafter\n"
        )
    page.write_text("no table")
    with pytest.raises(SystemExit, match="has 0 tables"):
        table.write(page, "")


@pytest.mark.parametrize("path", [p for paths in first.PARTS.values() for p in paths])
def test_what_the_first_call_is_made_of_is_still_there(path: str) -> None:
    owner, name = first.find(path)
    assert callable(getattr(owner, name))


@pytest.mark.parametrize("drawn", get_args(varying.Drawn))
def test_plans_for_each_shape_and_for_the_mean_see_the_same_images(drawn) -> None:
    for batch in varying.draw(drawn, 4, 3):
        shown = varying.even(batch)
        for images, shares in zip(batch[2:], shown[2:], strict=True):
            assert shares.shape[1] == varying.MEAN
            torch.testing.assert_close(shares.sum(1), images.sum(1))
            assert images.sum(1).max() == images.shape[1]


def test_the_page_has_the_table_of_schedules() -> None:
    page = Path(__file__).parents[2] / "docs" / "which_schedule.md"
    assert f"\n{choose.table()}\n" in page.read_text()
