"""The trainings of docs/examples.md run, and hold what they assert."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "examples.md"


def test_each_example_trains_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert len(blocks) == 8
    names: dict[str, object] = {}
    for text in blocks:
        exec(compile(text, str(PAGE), "exec"), names)
