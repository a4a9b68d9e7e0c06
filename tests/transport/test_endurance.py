"""What a process holds stays level over steps; a part of tests/endurance.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.endurance import Held, cases, endure, grown, loop


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "fsdp"])
def test_steps_add_no_threads_descriptors_or_tensors(name: str, tmp_path: Path) -> None:
    """Resident memory levels off only after more steps than these."""
    step, backend = loop(*cases(str(tmp_path))[name])
    with backend:
        held = [each._replace(memory=0) for each in endure(step, 60, 10)]
    assert grown(held) == []


def test_what_grows_is_said() -> None:
    one = Held(2**30, 4, 6, 100)
    assert grown([one, one, one, one._replace(threads=5)]) == ["threads from 4 to 5"]
    assert (
        grown([one, one, one._replace(threads=5), one]) == []
    )  # one that came and went
    more = one._replace(memory=2**30 + 2**22, tensors=101)
    assert grown([one, one, more]) == ["memory by 4.0 MiB", "tensors from 100 to 101"]
