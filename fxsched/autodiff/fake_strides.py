"""The strides of fake tensors, which those of some gradients claim wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..ir.graphs import tensors

aten = torch.ops.aten
CONTIGUOUS = {  # what these give; as fake tensors it has the strides of an input
    aten._log_softmax_backward_data.default,
    aten.huber_loss_backward.default,
    aten.mse_loss_backward.default,
    aten.native_group_norm_backward.default,
    aten.native_layer_norm_backward.default,
    aten.smooth_l1_loss_backward.default,
}
POINTWISE = {  # lie as a sum of their two tensors does, the gradient first
    aten.elu_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardswish_backward.default,
    aten.hardtanh_backward.default,
    aten.logit_backward.default,
    aten.softplus_backward.default,
}


@contextmanager
def true_strides(mode: Any) -> Iterator[None]:
    """Where operations of a FakeTensorMode give fake tensors the strides that real ones
    have: what a trace copies, and how gradients lie that are sent, depends on them."""
    dispatch = mode.dispatch

    def corrected(func: Any, *args: Any) -> Any:
        found = dispatch(func, *args)
        if func in CONTIGUOUS:
            return tree_map_only(Tensor, Tensor.contiguous, found)
        if func in POINTWISE:
            first, second = tensors(args[1])
            return first.add(second).to(found.dtype)
        return found

    mode.dispatch = corrected
    try:
        yield
    finally:
        del mode.dispatch
