"""Naps whose length is in the data: blocks that take as long as samples have images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

import fxsched

from .naps import FLOPS_PER_SECOND, sleep
from .sleepers import Block, Tree, loss


@torch.library.custom_op("bench::look", mutates_args=())
def look(x: Tensor, images: Tensor, seconds: float) -> Tensor:
    """x [batch, width], after so many seconds for each image; images [batch, n]: how
    much of an image is in each place. It counts as a whole one in each."""
    sleep("F", seconds * float(images.sum()))
    return x.clone()


@torch.library.custom_op("bench::look_backward", mutates_args=())
def look_backward(gradient: Tensor, images: Tensor, seconds: float) -> Tensor:
    """B of look: twice as long."""
    sleep("B", 2 * seconds * float(images.sum()))
    return gradient.clone()


@look.register_fake
@look_backward.register_fake
def _(x: Tensor, images: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(x)


fxsched.keeps_rows("bench::look")


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.seconds = inputs[2]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    (images,) = ctx.saved_tensors
    return torch.ops.bench.look_backward(gradient, images, ctx.seconds), None, None


look.register_autograd(_backward, setup_context=_keep)


@register_flop_formula(torch.ops.bench.look)
def _(x: Sequence[int], images: Sequence[int], seconds: float, **_: Any) -> int:
    return int(FLOPS_PER_SECOND * seconds * images[0] * images[1])


@register_flop_formula(torch.ops.bench.look_backward)
def _(x: Sequence[int], images: Sequence[int], seconds: float, **_: Any) -> int:
    return int(2 * FLOPS_PER_SECOND * seconds * images[0] * images[1])


class Look(Block):
    """seconds: of F, for an image."""

    def forward(self, *inputs: Tensor) -> Tensor:
        x, images = inputs
        out: Tensor = torch.ops.bench.look(x * self.scale, images, self.seconds)
        return out


class Album(Tree):
    """A tree whose branches take as long as their samples have images.

    seconds: of F of each of the head's blocks, for a row; image: of the branches', for
    an image.
    """

    def __init__(
        self, branches: int, length: int, head: int, seconds: float, image: float
    ) -> None:
        super().__init__(branches, length, head, seconds)
        for i in range(branches * length):
            self.blocks[i] = Look(image)

    def forward(self, *inputs: Tensor) -> Tensor:
        """inputs: for each branch [batch, WIDTH], then for each its images."""
        blocks, ends = list(self.blocks), []
        for branch, x in enumerate(inputs[: self.branches]):
            images = inputs[self.branches + branch]
            start = branch * self.length
            for block in blocks[start : start + self.length]:
                x = block(x, images)
            ends.append(x)
        first, *rest = blocks[self.branches * self.length :]
        x = first(*ends)
        for block in rest:
            x = block(x)
        return loss(x)
