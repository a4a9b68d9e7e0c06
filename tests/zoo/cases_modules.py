"""Modules of torch.nn, each between two linear maps or on its own kind of input."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .case import BATCH, PIPELINES, Inputs, Zoo

MODULES = Zoo("modules")
WIDTH = 16


class Around(nn.Module):
    """A linear map before and one after; the mean square of what comes out."""

    def __init__(self, inner: nn.Module, run: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = inner
        self.last = nn.LazyLinear(WIDTH)
        self.run = run or (lambda inner, x: inner(x))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.run(self.inner, torch.tanh(self.first(x)))
        return (self.last(out) - y).pow(2).mean()


def around(
    make: Callable[[], nn.Module],
    *shape: int,
    run: Callable[..., Any] | None = None,
    **options: Any,
) -> tuple[nn.Module, Inputs]:
    """A module within Around, and rows of x of a shape."""
    model = Around(make(), run)
    x = torch.randn(BATCH, *shape, WIDTH)
    with torch.no_grad():
        out = model.run(model.inner, torch.tanh(model.first(x)))
        y = torch.randn_like(model.last(out))
    model.zero_grad()
    return model, (x, y)


def add(name: str, make: Callable[[], nn.Module], *shape: int, **options: Any) -> None:
    run = options.pop("run", None)
    MODULES.add(name, functools.partial(around, make, *shape, run=run), **options)


def first(inner: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = inner(x)[0]
    return out


def images(inner: nn.Module, x: Tensor) -> Tensor:
    """Rows as images of 4 channels."""
    out: Tensor = inner(x.reshape(x.shape[0], 4, -1, WIDTH))
    return out.reshape(x.shape[0], -1)


def volumes(inner: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = inner(x.reshape(x.shape[0], 4, 4, -1, WIDTH))
    return out.reshape(x.shape[0], -1)


def lines(inner: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = inner(x)
    return out.reshape(x.shape[0], -1)


def complete(inner: nn.Module, x: Tensor) -> Tensor:
    return inner(x, x)


W = WIDTH
add("mlp", lambda: nn.Sequential(nn.Linear(W, 32), nn.GELU(), nn.Linear(32, W)))
add("bilinear", lambda: nn.Bilinear(W, W, W), run=complete)
ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (
    nn.ReLU,
    nn.ELU,
    nn.SELU,
    nn.SiLU,
    nn.Mish,
    nn.Softplus,
    nn.Hardswish,
    nn.LogSigmoid,
    nn.PReLU,
)
add("activations", lambda: nn.Sequential(*(a() for a in ACTIVATIONS)))
add("in_place_relu", lambda: nn.Sequential(nn.Linear(W, W), nn.ReLU(inplace=True)))
add("glu", lambda: nn.Sequential(nn.Linear(W, 32), nn.GLU()))
add("layer_norm", lambda: nn.LayerNorm(W))
add("rms_norm", lambda: nn.RMSNorm(W))
add("group_norm", lambda: nn.GroupNorm(2, 4), 4, 3, run=images)
add("local_response_norm", lambda: nn.LocalResponseNorm(2), 4, 3, run=images)
for kind, run, shape in (
    ("batch_norm_1d", lambda: nn.BatchNorm1d(W), ()),
    ("batch_norm_no_affine", lambda: nn.BatchNorm1d(W, affine=False), ()),
    ("batch_norm_cumulative", lambda: nn.BatchNorm1d(W, momentum=None), ()),
):
    add(kind, run, *shape, schedules=PIPELINES, apart=False)
add(
    "batch_norm_2d",
    lambda: nn.BatchNorm2d(4),
    *(4, 3),
    run=images,
    schedules=PIPELINES,
    apart=False,
)
add(
    "batch_norm_without_statistics",
    lambda: nn.BatchNorm1d(W, track_running_stats=False),
    apart=False,
)
add("instance_norm", lambda: nn.InstanceNorm2d(4, affine=True), 4, 3, run=images)
add(
    "instance_norm_statistics",
    lambda: nn.InstanceNorm2d(4, track_running_stats=True),
    *(4, 3),
    run=images,
    schedules=PIPELINES,
    apart=False,
)
add("conv_1d", lambda: nn.Conv1d(4, 6, 3, padding=1), 4, run=lines)
add("conv_2d", lambda: nn.Conv2d(4, 6, 3, stride=2), 4, 6, run=images)
add("conv_3d", lambda: nn.Conv3d(4, 2, 3, padding=1), 4, 4, 3, run=volumes)
add("conv_groups", lambda: nn.Conv2d(4, 8, 3, groups=2, dilation=2), 4, 6, run=images)
add(
    "conv_circular",
    lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
    *(4, 6),
    run=images,
)
add("conv_transpose_1d", lambda: nn.ConvTranspose1d(4, 3, 3), 4, run=lines)
add(
    "conv_transpose_2d", lambda: nn.ConvTranspose2d(4, 3, 2, stride=2), 4, 6, run=images
)
add(
    "pools",
    lambda: nn.Sequential(
        nn.MaxPool2d(2), nn.AvgPool2d(2, 1), nn.AdaptiveAvgPool2d((2, 3))
    ),
    *(4, 6),
    run=images,
)
add("adaptive_max_pool", lambda: nn.AdaptiveMaxPool2d(2), 4, 6, run=images)
add("lp_pool", lambda: nn.LPPool2d(2, 2), 4, 6, run=images)
add(
    "upsample",
    lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False),
    *(4, 6),
    run=images,
)
add("pixel_shuffle", lambda: nn.PixelShuffle(2), 4, 6, run=images)
add("unfold", lambda: nn.Unfold(2), 4, 6, run=images)
add("padding", lambda: nn.ReflectionPad2d(1), 4, 6, run=images)
ATTENTION: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "multihead_attention": lambda m, x: m(x, x, x)[0],
    "attention_without_weights": lambda m, x: m(x, x, x, need_weights=False)[0],
    "attention_causal": lambda m, x: m(
        x,
        x,
        x,
        attn_mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]),
        is_causal=True,
        need_weights=False,
    )[0],
}
for name, attend in ATTENTION.items():
    add(
        name,
        lambda: nn.MultiheadAttention(W, 4, batch_first=True),
        *(6,),
        run=attend,
    )
add(
    "attention_other_widths",
    lambda: nn.MultiheadAttention(
        W, 2, kdim=W, vdim=W, add_bias_kv=True, add_zero_attn=True, batch_first=True
    ),
    *(6,),
    run=lambda m, x: m(x, x, x)[0],
)
LAYER: dict[str, Any] = {"dim_feedforward": 32, "dropout": 0.0, "batch_first": True}
add("encoder_layer", lambda: nn.TransformerEncoderLayer(W, 4, **LAYER), 6)
add(
    "transformer_encoder",
    lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(W, 4, norm_first=True, **LAYER),
        2,
        enable_nested_tensor=False,
    ),
    *(6,),
)
add(
    "transformer_decoder",
    lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(W, 4, **LAYER), 2),
    *(6,),
    run=complete,
)
add(
    "transformer",
    lambda: nn.Transformer(
        W, 4, num_encoder_layers=1, num_decoder_layers=1, activation="gelu", **LAYER
    ),
    *(6,),
    run=complete,
)
add("lstm", lambda: nn.LSTM(W, W, 2, batch_first=True), 5, run=first)
add(
    "bidirectional_lstm",
    lambda: nn.LSTM(W, W, bidirectional=True, batch_first=True),
    *(5,),
    run=first,
)
add("gru", lambda: nn.GRU(W, W, batch_first=True), 5, run=first)
add("rnn", lambda: nn.RNN(W, W, batch_first=True), 5, run=first)


def unrolled(cell: nn.Module, x: Tensor) -> Tensor:
    hidden, outputs = x.new_zeros(x.shape[0], WIDTH), []
    for t in range(x.shape[1]):
        hidden = cell(x[:, t], hidden)
        outputs.append(hidden)
    return torch.stack(outputs, 1)


def unrolled_lstm(cell: nn.Module, x: Tensor) -> Tensor:
    state = x.new_zeros(x.shape[0], WIDTH), x.new_zeros(x.shape[0], WIDTH)
    for t in range(x.shape[1]):
        state = cell(x[:, t], state)
    return state[0]


add("gru_cell", lambda: nn.GRUCell(W, W), 4, run=unrolled)
add("lstm_cell", lambda: nn.LSTMCell(W, W), 4, run=unrolled_lstm)
add("flatten", lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Flatten(1)), 4)
add("fold", lambda: nn.Fold((5, 4), (2, 2)), 4, run=lambda m, x: m(x[..., :12]))


class Embedded(nn.Module):
    """A table, looked up in some way, and a head with cross entropy."""

    def __init__(self, table: nn.Module, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.table, self.run = table, run
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, ids: Tensor, label: Tensor) -> Tensor:
        out = self.head(self.run(self.table, ids))
        return nn.functional.cross_entropy(out.reshape(-1, 7), label.flatten())


def embedded(
    table: Callable[[], nn.Module], each: bool, run: Callable[..., Tensor]
) -> tuple[nn.Module, Inputs]:
    ids = torch.randint(1, 30, (BATCH, 5))
    label = torch.randint(0, 7, (BATCH, 5) if each else (BATCH,))
    return Embedded(table(), run), (ids, label)


TABLES: dict[str, tuple[Callable[[], nn.Module], bool, Callable[..., Tensor]]] = {
    "embedding": (lambda: nn.Embedding(30, W), True, lambda m, i: m(i)),
    "embedding_padding": (
        lambda: nn.Embedding(30, W, padding_idx=3),
        True,
        lambda m, i: m(i),
    ),
    "embedding_by_frequency": (
        lambda: nn.Embedding(30, W, scale_grad_by_freq=True),
        True,
        lambda m, i: m(i),
    ),
    "embedding_max_norm": (
        lambda: nn.Embedding(30, W, max_norm=1.0),
        True,
        lambda m, i: m(i),
    ),
    "embedding_bag": (lambda: nn.EmbeddingBag(30, W), False, lambda m, i: m(i)),
    "embedding_bag_sum": (
        lambda: nn.EmbeddingBag(30, W, mode="sum"),
        False,
        lambda m, i: m(i),
    ),
    "embedding_bag_max": (
        lambda: nn.EmbeddingBag(30, W, mode="max"),
        False,
        lambda m, i: m(i),
    ),
    "embedding_sparse": (
        lambda: nn.Embedding(30, W, sparse=True),
        True,
        lambda m, i: m(i),
    ),
}
for name, (table, each, look) in TABLES.items():
    mixes = name in ("embedding_by_frequency", "embedding_max_norm")
    MODULES.add(name, functools.partial(embedded, table, each, look), apart=not mixes)

LOSSES: dict[str, Callable[[], nn.Module]] = {
    "mse": nn.MSELoss,
    "l1": nn.L1Loss,
    "smooth_l1": nn.SmoothL1Loss,
    "huber": nn.HuberLoss,
    "bce_with_logits": nn.BCEWithLogitsLoss,
    "kl_div": lambda: nn.KLDivLoss(reduction="batchmean"),
    "poisson_nll": nn.PoissonNLLLoss,
    "soft_margin": nn.SoftMarginLoss,
}


class Lossy(nn.Module):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH))
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.net(x), y)


def lossy(loss: Callable[[], nn.Module]) -> tuple[nn.Module, Inputs]:
    return Lossy(loss()), (torch.randn(BATCH, WIDTH), torch.rand(BATCH, WIDTH))


for name, make in LOSSES.items():
    MODULES.add(f"loss_{name}", functools.partial(lossy, make))


@MODULES(apart=False)
def loss_ctc() -> tuple[nn.Module, Inputs]:
    class Ctc(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(WIDTH, 9)

        def forward(self, x: Tensor, label: Tensor) -> Tensor:
            scores = self.net(x).log_softmax(-1).transpose(0, 1)
            rows = x.shape[0]
            return nn.functional.ctc_loss(
                scores,
                label,
                torch.full((rows,), x.shape[1]),
                torch.full((rows,), label.shape[1]),
            )

    x = torch.randn(BATCH, 12, WIDTH)
    return Ctc(), (x, torch.randint(1, 9, (BATCH, 4)))
