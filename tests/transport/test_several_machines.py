"""A script on two machines; see tests/several_machines.py."""

from __future__ import annotations

import pytest

from tests import several_machines


@pytest.mark.slow
def test_two_machines_train_as_threads_do() -> None:
    assert several_machines.main() == 0
