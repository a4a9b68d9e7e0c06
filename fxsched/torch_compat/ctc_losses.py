"""CTC losses in the graphs that Dynamo and torch.export make: see ir/ctc.py.

The only file that tells PyTorch of an operation's fake results.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from ..ir.ctc import ctc_loss

OURS = dict.fromkeys(
    (F.ctc_loss, torch.ctc_loss, torch.ops.aten.ctc_loss.Tensor), ctc_loss
)
_OPEN: ContextVar[bool] = ContextVar("fxsched_ctc_loss", default=False)


@contextmanager
def ctc_traced() -> Iterator[None]:
    """While it is open, CTC losses with lengths as tensors can be traced; what runs is
    fxsched's own in their place."""
    func: Any = torch.ops.aten._ctc_loss.Tensor
    if func not in fake_impls.op_implementations_dict:
        fake_impls.register_op_impl(func)(_fake)
    token = _OPEN.set(True)
    try:
        yield
    finally:
        _OPEN.reset(token)


def _fake(mode: Any, func: Any, log_probs: Tensor, *rest: Any, **named: Any) -> Any:
    """Outside of ctc_traced() as if nothing had been told."""
    if not _OPEN.get():
        raise DynamicOutputShapeException(func)
    time, samples, _ = log_probs.shape
    with mode:
        losses = log_probs.new_empty(samples)
        return losses, log_probs.new_empty(samples, time, 1)
