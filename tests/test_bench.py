"""The peers' model in the benchmarks is fxsched's."""

import torch

from fxsched.models.gpt import GPTConfig

from .bench.language import Setup, Stretch


def test_parts_in_a_row_are_the_model() -> None:
    setup = Setup(GPTConfig(vocabulary=8, length=4, width=8, layers=2), 2, 1, False)
    line = setup.line()
    out = Stretch(line.parts)(**line.inputs)
    line.loss(out, line.target).backward()
    found = {name: p.grad for name, p in line.model.named_parameters()}
    torch.testing.assert_close(found, setup.gradients())
