"""The rule of each operation."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ..ir.graphs import operation_name
from . import compute_rules as compute
from . import declared, higher_order
from . import index_rules as index
from . import layout_rules as layout
from . import product_rules as product
from .declared import DECLARED
from .kinds import Effect, Kind, OpCall, Rule, where_known


def _last(count: int) -> Rule:
    return partial(compute.trailing, lambda call: count)


def _product(roles: str) -> Rule:
    return partial(product.multiplied, roles)


TABLE: tuple[tuple[Rule, str], ...] = (
    (layout.reshaped, "view _unsafe_view _reshape_alias"),
    (layout.rearranged, "permute transpose t unsqueeze"),
    (layout.expanded, "expand repeat"),
    (layout.squeezed, "squeeze"),
    (layout.selected, "select unbind"),
    (
        layout.parted,
        "slice split split_with_sizes unsafe_split unsafe_split_with_sizes",
    ),
    (layout.strided, "as_strided"),
    (layout.windowed, "unfold"),
    (layout.diagonal, "diagonal"),
    (layout.joined, "cat"),
    (layout.stacked, "stack"),
    (index.picked, "picked"),
    (index.embedded, "embedding"),
    (index.by_sample, "ctc_rows"),
    (index.indexed, "index _unsafe_index"),
    (index.written, "index_put _unsafe_index_put _index_put_impl"),
    (index.gathered, "gather scatter scatter_add scatter_reduce"),
    (index.taken, "index_select"),
    (index.placed, "index_add index_copy index_fill"),
    (partial(compute.reduced, Kind.SUM, Effect.REDUCTION), "sum nansum bincount"),
    (partial(compute.reduced, Kind.MEAN, Effect.REDUCTION), "mean"),
    (compute.histogram, "histc"),
    (
        partial(compute.reduced, Kind.OTHER, Effect.STATISTICS),
        "var std var_mean std_mean linalg_vector_norm norm",
    ),
    (
        partial(compute.reduced, Kind.OTHER, Effect.REDUCTION),
        "amax amin max min argmax argmin prod any all logsumexp median nanmedian "
        "mode count_nonzero aminmax kthvalue",
    ),
    (
        compute.along,
        "_softmax _log_softmax _safe_softmax cumsum cumprod cummax cummin "
        "logcumsumexp sort topk flip roll _fft_r2c _fft_c2r _fft_c2c glu",
    ),
    (compute.renorm, "renorm"),
    (compute.shrunk, "embedding_renorm"),
    (
        partial(compute.trailing, lambda call: len(call.get("normalized_shape"))),
        "native_layer_norm _fused_rms_norm",
    ),
    (
        partial(compute.trailing, lambda call: next(call.tensors()).dim() - 1),
        "native_group_norm im2col col2im _embedding_bag max_pool3d_with_indices "
        "avg_pool3d",
    ),
    (
        partial(compute.trailing, lambda call: len(call.args[1]) // 2),
        "constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d "
        "replication_pad1d replication_pad2d replication_pad3d",
    ),
    (_last(1), "upsample_linear1d upsample_nearest1d multinomial _sample_dirichlet"),
    (
        _last(2),
        "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d "
        "adaptive_max_pool2d upsample_nearest2d upsample_bilinear2d "
        "upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa "
        "_upsample_nearest_exact2d triu tril linalg_inv_ex linalg_cholesky_ex "
        "linalg_qr _linalg_det _linalg_eigh _linalg_svd linalg_matrix_exp "
        "grid_sampler_2d linalg_eig _linalg_eigvals _linalg_slogdet linalg_lu "
        "linalg_lu_factor_ex cholesky",
    ),
    (
        _last(3),
        "pixel_shuffle pixel_unshuffle channel_shuffle upsample_trilinear3d "
        "grid_sampler_3d adaptive_max_pool3d _adaptive_avg_pool3d",
    ),
    (
        compute.batch_norm,
        "native_batch_norm cudnn_batch_norm miopen_batch_norm "
        "_native_batch_norm_legit _native_batch_norm_legit_functional "
        "_batch_norm_with_update",
    ),
    (product.convolution, "convolution mkldnn_convolution"),
    (product.distances, "_cdist_forward"),
    (_product("ik kj ij"), "mm addmm"),
    (_product("nik nkj nij"), "bmm baddbmm"),
    (_product("ik k i"), "mv addmv"),
    (_product("k k "), "dot vdot"),
    (product.trilinear, "_trilinear"),
    (
        product.attention,
        "_scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention "
        "_scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_fused_attention_overrideable",
    ),
    (partial(product.with_weights, 3), "_native_multi_head_attention"),
    (partial(product.with_weights, 1), "_transformer_encoder_layer_fwd"),
    (
        compute.losses,
        "mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss "
        "binary_cross_entropy_with_logits",
    ),
    (compute.nll_loss, "nll_loss_forward nll_loss2d_forward"),
    (
        compute.pointwise_first,
        "log_sigmoid_forward _thnn_fused_lstm_cell _thnn_fused_gru_cell",
    ),
    (compute.recurrent, "mkldnn_rnn_layer _cudnn_rnn miopen_rnn"),
    (compute.copied, "copy"),
    (
        compute.pointwise,  # beside those that have the tag
        "_to_copy detach alias lift_fresh native_dropout bernoulli uniform "
        "normal exponential masked_fill floor_divide rsub hardswish "
        "_prelu_kernel complex polar poisson _standard_gamma binomial random geometric "
        "rrelu_with_noise_functional cauchy log_normal",
    ),
    (
        compute.filled,
        "zeros_like ones_like empty_like full_like rand_like randn_like "
        "randint_like new_zeros new_ones new_empty new_full new_empty_strided zero "
        "fill",
    ),
    (higher_order.flex_attention, "flex_attention"),
    (higher_order.mapped, "map_impl"),
)
RULES = {name: where_known(rule) for rule, names in TABLE for name in names.split()}
POINTWISE, KEPT = where_known(compute.pointwise), where_known(declared.kept)


def rule_of(func: Any) -> Rule | None:
    """The rule of an operation, in place or not; None if there is none."""
    return KEPT if func in DECLARED else _own_rule(func)


def parts_of(call: OpCall) -> list[tuple[Tensor, int]] | None:
    """The tensors of which a call on parts must read parts, and along which dimension,
    of an operation that says so; None for others."""
    if call.target in DECLARED:
        return declared.parts(call)
    return higher_order.parts(call) if call.name == "flex_attention" else None


@cache
def _own_rule(func: Any) -> Rule | None:
    library, _, name = operation_name(func).partition("::")
    name = name.rstrip("_")
    if name in RULES and library in ("aten", "fxsched", "higher_order"):
        return RULES[name]
    functional = getattr(torch.ops.aten, name, None)
    for overload in (func, getattr(functional, getattr(func, "_overloadname", ""), 0)):
        if torch.Tag.pointwise in getattr(overload, "tags", ()):
            return POINTWISE
    return None
