"""The rule of each operation."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ..ir.graphs import operation_name
from . import declared, higher_order
from .compute_rules import (
    CASTS,
    along,
    batch_norm,
    copied,
    filled,
    histogram,
    pointwise,
    pointwise_first,
    recurrent,
    reduced,
    renorm,
    shrunk,
    trailing,
)
from .declared import DECLARED, kept
from .higher_order import RULES as BODIES
from .index_rules import RULES as PICKS
from .index_rules import picked
from .kinds import Effect, Kind, OpCall, Rule, where_known
from .layout_rules import RULES as MOVES
from .loss_rules import losses, nll_loss
from .product_rules import (
    attention,
    convolution,
    distances,
    multiplied,
    trilinear,
    with_weights,
)


def _last(count: int) -> Rule:
    return partial(trailing, lambda call: count)


TABLE: tuple[tuple[Rule, str], ...] = (
    (partial(reduced, Kind.SUM, Effect.REDUCTION), "sum nansum bincount"),
    (partial(reduced, Kind.MEAN, Effect.REDUCTION), "mean"),
    (histogram, "histc"),
    (
        partial(reduced, Kind.OTHER, Effect.STATISTICS),
        "var std var_mean std_mean linalg_vector_norm norm",
    ),
    (
        partial(reduced, Kind.OTHER, Effect.REDUCTION),
        "amax amin max min argmax argmin prod any all logsumexp median nanmedian "
        "mode count_nonzero aminmax kthvalue",
    ),
    (
        along,
        "_softmax _log_softmax _safe_softmax softmax log_softmax cumsum cumprod "
        "cummax cummin logcumsumexp sort topk argsort flip roll _fft_r2c _fft_c2r "
        "_fft_c2c glu",
    ),
    (renorm, "renorm"),
    (shrunk, "embedding_renorm"),
    (
        partial(trailing, lambda call: len(call.get("normalized_shape"))),
        "native_layer_norm _fused_rms_norm rms_norm layer_norm",
    ),
    (
        partial(trailing, lambda call: next(call.tensors()).dim() - 1),
        "native_group_norm im2col col2im _embedding_bag max_pool3d_with_indices "
        "avg_pool3d",
    ),
    (
        partial(
            trailing, lambda call: len(call.get("pad", call.get("padding", ()))) // 2
        ),
        "constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d "
        "replication_pad1d replication_pad2d replication_pad3d",
    ),
    (
        _last(1),
        "avg_pool1d max_pool1d adaptive_avg_pool1d upsample_linear1d "
        "upsample_nearest1d multinomial _sample_dirichlet",
    ),
    (
        _last(2),
        "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d "
        "adaptive_max_pool2d upsample_nearest2d upsample_bilinear2d "
        "upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa "
        "_upsample_nearest_exact2d triu tril linalg_inv_ex linalg_cholesky_ex "
        "linalg_qr _linalg_det _linalg_eigh _linalg_svd linalg_matrix_exp inverse "
        "grid_sampler_2d linalg_eig _linalg_eigvals _linalg_slogdet linalg_lu "
        "linalg_lu_factor_ex cholesky",
    ),
    (
        _last(3),
        "pixel_shuffle pixel_unshuffle channel_shuffle upsample_trilinear3d "
        "grid_sampler_3d adaptive_max_pool3d _adaptive_avg_pool3d",
    ),
    (
        batch_norm,
        "native_batch_norm cudnn_batch_norm miopen_batch_norm "
        "_native_batch_norm_legit _native_batch_norm_legit_functional "
        "_batch_norm_with_update",
    ),
    (convolution, "convolution mkldnn_convolution"),
    (distances, "_cdist_forward"),
    (partial(multiplied, ("ik", "kj", "ij"), 0), "mm"),
    (partial(multiplied, ("nik", "nkj", "nij"), 0), "bmm"),
    (partial(multiplied, ("ik", "k", "i"), 0), "mv"),
    (partial(multiplied, ("k", "k", ""), 0), "dot vdot"),
    (partial(multiplied, ("ik", "kj", "ij"), 1), "addmm"),
    (partial(multiplied, ("nik", "nkj", "nij"), 1), "baddbmm"),
    (partial(multiplied, ("ik", "k", "i"), 1), "addmv"),
    (trilinear, "_trilinear"),
    (
        attention,
        "_scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention "
        "_scaled_dot_product_cudnn_attention _scaled_dot_product_attention_math "
        "_scaled_dot_product_fused_attention_overrideable",
    ),
    (partial(with_weights, 3), "_native_multi_head_attention"),
    (partial(with_weights, 1), "_transformer_encoder_layer_fwd"),
    (
        losses,
        "mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss "
        "binary_cross_entropy_with_logits",
    ),
    (
        pointwise_first,
        "log_sigmoid_forward _thnn_fused_lstm_cell _thnn_fused_gru_cell",
    ),
    (recurrent, "mkldnn_rnn_layer _cudnn_rnn miopen_rnn"),
    (nll_loss, "nll_loss_forward nll_loss2d_forward"),
    (
        pointwise,
        "native_dropout bernoulli uniform normal exponential masked_fill where "
        "clamp clamp_min clamp_max fill_diagonal "
        "floor_divide remainder rsub hardswish _prelu_kernel complex polar poisson "
        "_standard_gamma rrelu_with_noise_functional binomial random geometric cauchy "
        "log_normal",
    ),
    (
        filled,
        "zeros_like ones_like empty_like full_like rand_like randn_like "
        "randint_like new_zeros new_ones new_empty new_full new_empty_strided zero "
        "fill",
    ),
)

RULES: dict[str, Rule] = {
    "picked": picked,
    **MOVES,
    **PICKS,
    **{name: rule for rule, names in TABLE for name in names.split()},
    **dict.fromkeys(CASTS, pointwise),
    "copy": copied,
}
RULES = {name: where_known(rule) for name, rule in RULES.items()}
HIGHER = {name: where_known(rule) for name, rule in BODIES.items()}
POINTWISE, KEPT = where_known(pointwise), where_known(kept)


def rule_of(func: Any) -> Rule | None:
    """The rule of an operation, in place or not; None if there is none."""
    return KEPT if func in DECLARED else _own_rule(func)


def parts_of(call: OpCall) -> list[tuple[Tensor, int]] | None:
    """The tensors of which a call on parts must read parts, and along which dimension,
    of an operation that says so; None for others."""
    if call.func in DECLARED:
        return declared.parts(call)
    if operation_name(call.func) == "higher_order::flex_attention":
        return higher_order.parts(call)
    return None


@cache
def _own_rule(func: Any) -> Rule | None:
    library, _, name = operation_name(func).partition("::")
    if library == "higher_order":
        return HIGHER.get(name)
    for each in (name, name.rstrip("_")):
        if each in RULES and library in ("aten", "fxsched"):
            return RULES[each]
    functional = getattr(torch.ops.aten, name.rstrip("_"), None)
    for overload in (func, getattr(functional, func._overloadname, None)):
        if torch.Tag.pointwise in getattr(overload, "tags", ()):
            return POINTWISE
    return None
