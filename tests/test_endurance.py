"""What a process holds stays level over steps; a part of tests/endurance.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.endurance import Held, cases, endure, grown, loop


@pytest.mark.parametrize("name", ["1f1b", "fsdp"])
def test_nothing_is_added_by_a_step(name: str, tmp_path: Path) -> None:
    step, backend = loop(*cases(str(tmp_path))[name])
    with backend:
        assert grown(endure(step, 60, 10)) == []


def test_what_grows_is_said() -> None:
    one = Held(2**30, 4, 6, 100)
    assert grown([one, one, one, one._replace(threads=5)]) == ["threads from 4 to 5"]
    assert (
        grown([one, one, one._replace(threads=5), one]) == []
    )  # one that came and went
    more = one._replace(memory=2**30 + 2**22, tensors=101)
    assert grown([one, one, more]) == ["memory by 4.0 MiB", "tensors from 100 to 101"]
