"""Operators of torch.library, and attention by FlexAttention, to place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

LENGTH = 8
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def probabilities(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1)


@torch.library.custom_op("placed::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, of [batch, heads, length, width], where heads of keys may be fewer."""
    assert len(q) == len(k) == len(v)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return probabilities(q, k) @ v


@torch.library.custom_op("placed::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    heads, group = k.shape[1], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    p, gp = probabilities(q, k), grad @ v.transpose(-2, -1)
    gs = p * (gp - (gp * p).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    gk, gv = gs.transpose(-2, -1) @ q, p.transpose(-2, -1) @ grad
    gk, gv = (each.unflatten(1, (heads, group)).sum(2) for each in (gk, gv))
    return gs @ k, gk, gv


@torch.library.custom_op("placed::scaled", mutates_args=())
def scaled(x: Tensor, w: Tensor | None = None, by: float = 2.0) -> Tensor:
    """Row by row; its backward divides by the largest gradient of all rows."""
    return x * by if w is None else x * w * by


attention.register_fake(lambda q, k, v: torch.empty_like(q))
attention_backward.register_fake(
    lambda grad, *given: tuple(torch.empty_like(each) for each in given)
)
scaled.register_fake(lambda x, w=None, by=2.0: torch.empty_like(x))


def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def keep_by(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.by = inputs[2]


attention.register_autograd(
    lambda ctx, grad: attention_backward(grad, *ctx.saved_tensors), setup_context=keep
)
scaled.register_autograd(
    lambda ctx, grad: (ctx.by * grad / grad.abs().max(), None, None),
    setup_context=keep_by,
)


def by_operator(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any
) -> Any:
    """What transformers calls in place of its own attention."""
    return attention(q, k, v).transpose(1, 2).contiguous(), None


def by_flex(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> Any:
    """With scores that depend on the head, and a mask that the model makes."""

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s - SLOPES[h] * (i - j)

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    blocks = create_block_mask(
        causal, len(q), None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=(4, 4)
    )
    out = flex_attention(q, k, v, score, blocks, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None
