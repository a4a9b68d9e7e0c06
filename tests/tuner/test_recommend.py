"""What fxsched.recommend says of small models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, recommend

from ..cases import mlp, two_tower


@pytest.mark.slow
def test_the_shortest_step_is_taken_and_its_schedule_plans_the_same() -> None:
    model, inputs = two_tower()
    found = recommend(model, 2, *inputs)
    choices = [found.best, *found.others]
    least = min(each.seconds for each in choices)
    assert found.best.seconds <= least * 1.03
    names = {each.code.partition("(")[0] for each in choices}
    assert names == {"one process", "ddp", "auto"}
    again = fxsched.plan(model, found.schedule, *inputs)
    assert again.simulate().latency == pytest.approx(found.best.seconds)
    text = str(found)
    assert text.startswith(f"take {found.best.code}: ")
    assert "what limits the step" in text


class Light(nn.Module):
    """Little work for many weights, which take longer to send than to use."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4096, 512)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x).square().mean()


def test_one_process_is_taken_where_nothing_is_faster() -> None:
    network = fxsched.Link(bandwidth=1e3, latency=1.0)
    x = torch.zeros(4, dtype=torch.long)
    found = recommend(Light(), 2, x, microbatches=2, network=network)
    assert found.best.code == "one process"
    assert "train without fxsched" in str(found)


def test_what_is_refused() -> None:
    model, (x, *rest) = mlp()
    with pytest.raises(PlanError, match="can't share the batch's 7 rows equally"):
        recommend(model, 2, torch.cat([x, x])[:7], *rest)
    with pytest.raises(PlanError, match=r"recommend\(workers=0\)"):
        recommend(model, 0, x, *rest)
    with pytest.raises(PlanError, match="memory_limit=1"):
        recommend(model, 2, x, *rest, microbatches=2, memory_limit=1)
