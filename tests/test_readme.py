"""The README's Python blocks run, and print what stands below them."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_blocks_run_and_print_what_the_readme_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a block writes a file
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", README.read_text(), re.M | re.S)
    names: dict[str, object] = {}
    printed = ""
    compared = 0
    for language, text in blocks:
        if language == "python":
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(text, str(README), "exec"), names)
            printed = output.getvalue()
        elif language == "text" and printed:
            assert _lines(printed) == _lines(text)
            printed = ""
            compared += 1
    assert compared == 3


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
