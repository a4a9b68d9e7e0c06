"""Which functions are captured as graphs; what graphs do is tested on the simulated
device, tests/transport/test_simulated_device.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fxsched.runtime.device_graphs import Watch

x = torch.randn(1, 4, 4)
ONE = torch.tensor(1.0)
CASES: list[tuple[str, Callable[[], object], bool]] = [
    ("matrix product", lambda: x.relu() @ x, True),
    ("attention", lambda: F.scaled_dot_product_attention(x, x, x), True),
    ("dropout", lambda: torch.dropout(x, 0.1, True), False),
    ("rows by number", lambda: x[torch.tensor([0])], True),
    ("rows by a mask", lambda: x[x > 0], False),
    ("a write by number", lambda: x.index_put((torch.tensor([0]),), ONE), True),
    ("a write by a mask", lambda: x.index_put((x > 0,), ONE), False),
    ("positions of values", lambda: x.nonzero(), False),
    ("a number on the host", lambda: x.sum().item(), False),
]


@pytest.mark.parametrize(
    ("run", "fixed"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_what_launches_the_same_at_each_call(
    run: Callable[[], object], fixed: bool
) -> None:
    with Watch() as watch:
        run()
    assert watch.fixed is fixed
