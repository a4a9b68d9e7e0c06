"""The rule of each operation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ..ir.graphs import operation_name
from . import compute_rules as compute
from . import declared
from . import layout_rules as layout
from .declared import DECLARED
from .kinds import Effect, Kind, OpCall, Rows, Rule, followed


def _last(count: int) -> Rule:
    return partial(compute.trailing, lambda call, x: count)


def _product(roles: str) -> Rule:
    return partial(compute.multiplied, roles)


TABLE: dict[str, Rule] = {
    "view _unsafe_view _reshape_alias": layout.reshaped,
    "permute transpose t unsqueeze": layout.rearranged,
    "expand repeat": layout.expanded,
    "squeeze": layout.squeezed,
    "select unbind": layout.selected,
    "slice split split_with_sizes unsafe_split unsafe_split_with_sizes": layout.parted,
    "view_as_complex view_as_real": layout.paired,
    "as_strided embedding_renorm": layout.strided,
    "unfold": layout.windowed,
    "diagonal": layout.diagonal,
    "cat": layout.joined,
    "stack": layout.stacked,
    "chosen_rows": layout.chosen_rows,
    "embedding": layout.embedded,
    "ctc_rows": layout.by_sample,
    "index _unsafe_index": layout.indexed,
    "index_put _unsafe_index_put _index_put_impl": layout.written,
    "gather scatter scatter_add scatter_reduce": layout.gathered,
    "index_select": layout.taken,
    "index_add index_copy index_fill": layout.placed,
    "sum nansum bincount": partial(compute.reduced, Kind.SUM, Effect.REDUCTION),
    "mean": partial(compute.reduced, Kind.MEAN, Effect.REDUCTION),
    "histc": compute.histogram,
    "var std var_mean std_mean linalg_vector_norm norm": partial(
        compute.reduced, Kind.OTHER, Effect.STATISTICS
    ),
    "amax amin max min argmax argmin prod any all logsumexp median nanmedian mode "
    "count_nonzero aminmax kthvalue": partial(
        compute.reduced, Kind.OTHER, Effect.REDUCTION
    ),
    "_softmax _log_softmax _safe_softmax cumsum cumprod cummax cummin logcumsumexp "
    "sort topk flip roll _fft_r2c _fft_c2r _fft_c2c glu": partial(
        compute.over, Effect.ORDER, OpCall.dims
    ),
    "renorm": partial(
        compute.over, Effect.ORDER, lambda call, x: {*range(x.dim())} - call.dims(x)
    ),
    "native_layer_norm _fused_rms_norm": partial(
        compute.trailing, lambda call, x: len(call.get("normalized_shape"))
    ),
    "native_group_norm": compute.group_norm,
    "im2col col2im _embedding_bag max_pool3d_with_indices avg_pool3d": partial(
        compute.trailing, lambda call, x: x.dim() - 1
    ),
    "constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d "
    "replication_pad1d replication_pad2d replication_pad3d": partial(
        compute.over, Effect.MIX, compute.padded
    ),
    "upsample_linear1d upsample_nearest1d multinomial _sample_dirichlet": _last(1),
    "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d "
    "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_nearest_exact2d triu "
    "tril linalg_inv_ex linalg_cholesky_ex linalg_qr _linalg_det _linalg_eigh "
    "_linalg_svd linalg_matrix_exp grid_sampler_2d linalg_eig _linalg_eigvals "
    "_linalg_slogdet linalg_lu linalg_lu_factor_ex cholesky": _last(2),
    "pixel_shuffle pixel_unshuffle channel_shuffle upsample_nearest3d "
    "upsample_trilinear3d grid_sampler_3d adaptive_max_pool3d "
    "_adaptive_avg_pool3d": _last(3),
    "native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit "
    "_native_batch_norm_legit_functional _batch_norm_with_update": compute.batch_norm,
    "convolution mkldnn_convolution": compute.convolution,
    "_cdist_forward": compute.distances,
    "mm addmm": _product("ik kj ij"),
    "bmm baddbmm": _product("nik nkj nij"),
    "mv addmv": _product("ik k i"),
    "dot vdot": _product("k k "),
    "_trilinear": compute.trilinear,
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable": compute.attention,
    "_native_multi_head_attention": partial(compute.with_weights, 3),
    "_transformer_encoder_layer_fwd": partial(compute.with_weights, 1),
    "mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss "
    "binary_cross_entropy_with_logits": compute.losses,
    "nll_loss_forward nll_loss2d_forward": compute.nll_loss,
    "mkldnn_rnn_layer _cudnn_rnn miopen_rnn": compute.recurrent,
    "_to_copy detach alias lift_fresh native_dropout bernoulli uniform normal "
    "exponential masked_fill floor_divide rsub hardswish _prelu_kernel complex polar "
    "poisson _standard_gamma binomial random geometric rrelu_with_noise_functional "
    "cauchy log_normal log_sigmoid_forward _thnn_fused_lstm_cell "
    "_thnn_fused_gru_cell": compute.pointwise,
    "zeros_like ones_like empty_like full_like rand_like randn_like randint_like "
    "new_zeros new_ones new_empty new_full new_empty_strided zero fill": compute.filled,
    "flex_attention": declared.flex_attention,
    "map_impl": declared.mapped,
}
# The arguments of which it counts where rows met before, if not all: what is filled
# gives its shape, and how weights of labels add up tells more.
COUNTED: dict[Rule, slice] = {
    compute.filled: slice(1, None),
    compute.nll_loss: slice(2),
}
RULES = {
    name: followed(rule, COUNTED.get(rule, slice(None)))
    for names, rule in TABLE.items()
    for name in names.split()
}


def _copied(call: OpCall) -> Rows | Sequence[Rows]:
    """copy: what is written over counts for its shape, where no rows are apart."""
    values = call.values
    if len(values) == 2 and all(r.reduced or r.kind is Kind.REPLICATE for r in values):
        return values[1]
    return POINTWISE(call)


RULES["copy"] = _copied
POINTWISE, KEPT = followed(compute.pointwise), followed(declared.kept)


def rule_of(func: Any) -> Rule | None:
    """The rule of an operation, in place or not; None if there is none."""
    return KEPT if func in DECLARED else _own_rule(func)


def parts_of(call: OpCall) -> list[tuple[Tensor, int]] | None:
    """The tensors of which a call on parts must read parts, and along which dimension,
    of an operation that says so; None for others."""
    read = None
    if call.target in DECLARED:
        read = declared.reads(call)
    elif call.name == "flex_attention":
        read = declared.flex_reads(call)
    if read is None:
        return None
    return [(tensor, rows.dim) for tensor, rows in read if rows.sharded]


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
