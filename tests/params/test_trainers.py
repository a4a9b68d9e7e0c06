"""The blocks of docs/huggingface.md, in a process of their own, for Lightning wraps
torch.compile where it is imported; there a model that Dynamo breaks is compiled too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.package.test_readme import blocks
from tests.torchrun import ONE_THREAD, ROOT

BROKEN = """
class Breaks(torch.nn.Linear):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x).pow(2).mean()

broken, x = Breaks(4, 4), torch.randn(8, 4)
backend = fxsched.backend(schedules.gpipe(workers=2, microbatches=2))
compiled = torch.compile(broken, backend=backend)
torch.testing.assert_close(compiled(x), broken(x))
torch.testing.assert_close(compiled(2 * x), broken(2 * x))
"""


@pytest.mark.slow
def test_trainers_train_compiled_models_as_they_are(tmp_path: Path) -> None:
    page = blocks(ROOT / "docs" / "huggingface.md", "python")
    code = "\n".join([*(text for _, text in page), BROKEN])
    environment = os.environ | ONE_THREAD | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "captured by torch.export" in done.stderr
