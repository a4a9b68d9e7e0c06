"""The pages "From DDP" and its neighbours: both scripts of the diff print one loss."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from ..torchrun import ONE_THREAD, launcher

DOCS = Path(__file__).parents[2] / "docs"
DIFF = re.compile(r"^```diff\n(.*?)^```$", re.M | re.S)


def losses(script: Path, text: str, sign: str) -> list[float]:
    """What two ranks print, run with the lines of one side of a diff."""
    lines = [line[1:] for line in text.splitlines() if line[:1] in (sign, " ")]
    script.write_text("\n".join(lines) + "\n")
    *command, _ = launcher(2)  # a file, no module
    done = subprocess.run(
        [*command, str(script)],
        env=os.environ | ONE_THREAD,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "pipelining"])
def test_both_scripts_of_a_diff_print_the_same_losses(
    name: str, tmp_path: Path
) -> None:
    (text,) = DIFF.findall((DOCS / f"from_{name}.md").read_text())
    before = losses(tmp_path / "before.py", text, "-")
    after = losses(tmp_path / "after.py", text, "+")
    assert len(before) == 8 and before[-1] < before[0]
    assert after == pytest.approx(before, abs=1e-5)
