"""Operations of torch.export's graphs as a model's code would call them.

Dynamo's graphs have torch.add and F.cross_entropy where these have aten::add.Tensor and
aten::cross_entropy_loss. What reads a graph (rows, weighted losses) knows the former.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._ops import OpOverload

from ..ir.ctc import ctc_loss

ALIKE = "add sub mul div pow true_divide arange eye linspace randperm"
ALIKE += " tril_indices range lstm gru rnn_tanh rnn_relu"
IN_PLACE = "add_ sub_ mul_ div_ pow_"

WEIGHTED = "input target weight reduction"
LOSSES: Mapping[str, tuple[Any, str]] = {
    "cross_entropy_loss": (F.cross_entropy, WEIGHTED + " ignore_index label_smoothing"),
    "nll_loss": (F.nll_loss, WEIGHTED + " ignore_index"),
    "nll_loss_nd": (F.nll_loss, WEIGHTED + " ignore_index"),
    "nll_loss2d": (F.nll_loss, WEIGHTED + " ignore_index"),
    "mse_loss": (F.mse_loss, "input target reduction"),
    "l1_loss": (F.l1_loss, "input target reduction"),
    "smooth_l1_loss": (F.smooth_l1_loss, "input target reduction beta"),
    "huber_loss": (F.huber_loss, "input target reduction delta"),
    "kl_div": (F.kl_div, "input target reduction log_target"),
    "binary_cross_entropy": (F.binary_cross_entropy, WEIGHTED),
    "binary_cross_entropy_with_logits": (
        F.binary_cross_entropy_with_logits,
        "input target weight pos_weight reduction",
    ),
    "ctc_loss": (
        ctc_loss,
        "log_probs targets input_lengths target_lengths blank reduction zero_infinity",
    ),
    "soft_margin_loss": (F.soft_margin_loss, "input target reduction"),
    "poisson_nll_loss": (
        F.poisson_nll_loss,
        "input target log_input full eps reduction",
    ),
}
REDUCTIONS = ("none", "mean", "sum")


class Spoken:
    """A call as a model's code has it."""

    def __init__(self, node: fx.Node) -> None:
        self.op, self.target = node.op, node.target
        self.args: Sequence[Any] = node.args
        self.kwargs: Mapping[str, Any] = node.kwargs
        if isinstance(node.target, OpOverload) and node.target.namespace == "aten":
            self._speak(node.target)

    def _speak(self, func: OpOverload[Any, Any]) -> None:
        name = func._schema.name.split("::")[1]
        if name in LOSSES:
            self.target, parameters = LOSSES[name]
            given = zip(parameters.split(), self.args, strict=False)
            named = {**dict(given), **self.kwargs}
            named.pop("self", None)
            if isinstance(named.get("reduction", 1), int):
                named["reduction"] = REDUCTIONS[named.get("reduction", 1)]
            self.args, self.kwargs = (), named
        elif name in ALIKE.split():
            self.target = getattr(torch, name)
        elif name in IN_PLACE.split():
            self.op, self.target = "call_method", name
        elif name == "lift_fresh_copy":
            self.target = torch.clone
