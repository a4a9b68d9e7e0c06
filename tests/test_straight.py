"""The Python that a program becomes, and that it lets go of values in time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fxsched.program import Program
from fxsched.source import let_go
from fxsched.straight import Straight
from tests.test_passes import plan_of


@pytest.mark.parametrize("schedule", ["shifted", "zb_h1"])
def test_source_of(schedule: str, golden: Callable[[str, str], None]) -> None:
    for rank in (0, 1):
        straight = Straight(Program(plan_of(schedule).programs[rank]), record=True)
        lines = let_go(straight.source.lines)
        assert straight.tasks == [task for _, task in lines]
        text = "\n".join(f"{task:<9} {line}" for line, task in lines)
        golden(f"source_{schedule}_{rank}", text)


def test_a_variable_is_let_go_after_its_last_use() -> None:
    lines = [("v1 = f()", ""), ("v2 = g(v1)", ""), ("h(v1, v2)", ""), ("v3 = f()", "")]
    assert [text for text, _ in let_go(lines)] == [
        "v1 = f()",
        "v2 = g(v1)",
        "h(v1, v2); v1 = v2 = None",
        "v3 = f(); v3 = None",
    ]
