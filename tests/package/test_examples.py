"""docs/examples: each script learns, saves or resumes as its head says."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..torchrun import ONE_THREAD, launcher

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
LOSS = re.compile(r"(?:'loss': '|loss |: )([\d.]+)(?:'| bits|$)", re.M)


def run(folder: Path, *command: str, ranks: int = 0) -> str:
    """What a script prints that runs in that folder, as threads or on ranks."""
    python = launcher(ranks)[:-1] if ranks else [sys.executable]
    done = subprocess.run(
        [*python, str(EXAMPLES / command[0]), *command[1:]],
        cwd=folder,
        env=os.environ | ONE_THREAD,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("nanogpt.py --steps 50", "def __init__(self, "),
        ("clip.py --steps 41", "held-out docstrings find their function's picture"),
        ("llava_lora.py --steps 11", "adapter_model.safetensors"),
        ("hf_trainer.py --rows 200", "held-out loss"),
    ],
)
def test_a_script_learns_and_ends(command: str, said: str, tmp_path: Path) -> None:
    printed = run(tmp_path, *command.split())
    first, *_, last = (float(loss) for loss in LOSS.findall(printed))
    assert last < 0.95 * first
    assert said in printed


@pytest.mark.slow
def test_a_training_goes_on_with_other_ranks_and_another_schedule(
    tmp_path: Path,
) -> None:
    steps = ("resume.py", "--save-every", "2", "--steps")
    whole = run(tmp_path, *steps, "6", "--folder", "whole")
    run(tmp_path, *steps, "2")
    parts = run(tmp_path, *steps, "4", "--schedule", "fsdp", ranks=2)
    assert parts.startswith("goes on after step 2\n")
    parts += run(tmp_path, *steps, "6", ranks=2)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", parts)]
    wanted = [float(loss) for loss in re.findall(r"loss ([\d.]+)", whole)]
    assert losses == pytest.approx(wanted[1:], abs=1e-5)


@pytest.mark.slow
def test_cells_of_the_notebook_run_and_show_pictures(tmp_path: Path) -> None:
    names: dict[str, object] = {}
    shown = []
    cells = json.loads((EXAMPLES / "first_steps.ipynb").read_text())["cells"]
    for cell in cells:
        if cell["cell_type"] == "code":
            assert not cell["outputs"]
            tree = ast.parse("".join(cell["source"]))
            *_, last = tree.body
            if isinstance(last, ast.Expr):  # its value is what a notebook displays
                tree.body[-1] = ast.Assign([ast.Name("_", ast.Store())], last.value)
            exec(compile(ast.fix_missing_locations(tree), "notebook", "exec"), names)
            shown.append(names.pop("_", None))
    pictures = [each for each in shown if hasattr(each, "_repr_html_")]
    assert len(pictures) == 2


def test_every_example_has_a_test_and_a_link() -> None:
    page = EXAMPLES.with_suffix(".md").read_text()
    mine = Path(__file__).read_text()
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert files and all(f"(examples/{name})" in page for name in files)
    assert all(name in mine for name in files)
