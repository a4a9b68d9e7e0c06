"""Models of timm, torchvision and diffusers, where they are installed.

`pip install --no-deps --target DIR timm torchvision diffusers requests` and PYTHONPATH
will do; without a package its rows are skipped.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor, nn

from .case import BATCH, PIPELINES, Inputs, Zoo
from .hf import still

TIMM, TORCHVISION, DIFFUSERS = Zoo("timm"), Zoo("torchvision"), Zoo("diffusers")


def need(package: str) -> Any:
    return importlib.import_module(package)


class Classifier(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.inner(x), label)


def of_timm(kind: str, size: int, values: dict[str, Any]) -> tuple[nn.Module, Inputs]:
    timm = need("timm")
    model = still(timm.create_model(kind, num_classes=5, **values)).train()
    images = torch.randn(BATCH, 3, size, size)
    return Classifier(model), (images, torch.arange(BATCH) % 5)


SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
STEPS = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}
WITH_NORM: dict[str, tuple[str, int, dict[str, Any]]] = {
    "timm_resnet": ("resnet10t", 32, {}),
    "timm_mobilenetv3": ("mobilenetv3_small_050", 32, {}),
    "timm_mobilenetv2": ("mobilenetv2_035", 32, {}),
    "timm_ghostnet": ("ghostnet_050", 32, {"drop_rate": 0.0}),
    "timm_regnet": ("regnetx_002", 32, {}),
    "timm_repvgg": ("repvgg_a0", 32, {}),
}
PLAIN: dict[str, tuple[str, int, dict[str, Any]]] = {
    "timm_vit": ("vit_tiny_patch16_224", 16, SMALL),
    "timm_deit3": ("deit3_small_patch16_224", 16, SMALL),
    "timm_cait": (
        "cait_xxs24_224",
        16,
        {**SMALL, "init_values": 0.1, "depth_token_only": 1},
    ),
    "timm_mixer": (
        "mixer_s32_224",
        64,
        {"img_size": 64},
    ),
    "timm_gmlp": (
        "gmlp_s16_224",
        64,
        {"img_size": 64},
    ),
    "timm_convnext": ("convnext_atto", 32, STEPS),
    "timm_swin": (
        "swin_tiny_patch4_window7_224",
        32,
        {
            "img_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": (2, 1),
            "num_heads": (2, 4),
            "window_size": 4,
        },
    ),
    "timm_eva": (
        "eva02_tiny_patch14_224",
        16,
        SMALL,
    ),
}
for name, arguments in PLAIN.items():
    TIMM.add(name, functools.partial(of_timm, *arguments))
for name, arguments in WITH_NORM.items():
    TIMM.add(
        name,
        functools.partial(of_timm, *arguments),
        schedules=PIPELINES,
        apart=False,
    )


# A small model of most of timm's modules, on 32 x 32 pixels if no size is given. The
# first ones take img_size.
SIZED = """
mobileone_s1 coat_tiny convit_tiny deit_tiny_patch16_224 efficientformer_l1@224
efficientformerv2_s0 efficientvit_m0 gcvit_xxtiny hiera_tiny_224
maxvit_pico_rw_256 mixer_s16_224 mobilevit_xxs mvitv2_tiny nest_tiny pit_xs_224
repvit_m0_9 sequencer2d_s swiftformer_xs swinv2_tiny_window8_256
swinv2_cr_tiny_224 tnt_s_legacy_patch16_224 twins_svt_small visformer_tiny
vit_srelpos_small_patch16_224 vitamin_small_224 volo_d1_224 xcit_nano_12_p8_224
"""
UNSIZED = """
convmixer_1024_20_ks9_p14 cpubone_nano crossvit_tiny_240 csatv2@64
cs3darknet_focus_s cspnext_tiny davit_tiny densenet121 dla102x edgenext_xx_small
tinynet_e efficientvim_m1 efficientvit_b0 fasternet_t0 fastvit_s12
focalnet_tiny_srf hardcorenas_b hgnetv2_b0 sam2_hiera_tiny hrnet_w18_small
iformer_s inception_next_atto inception_v3@96 lcnetv2_small lowformer_b0
mambaout_femto poolformer_s12 lcnet_035 nextvit_small nf_regnet_b0 pvt_v2_b0
rdnet_tiny repghostnet_050 resnetv2_18 rexnet_100 selecsls42 legacy_seresnet18
shvit_s1 skresnet18 starnet_s050 tiny_vit_5m_224 tresnet_m ese_vovnet19b_slim_dw
legacy_xception xception41p
"""
for names, takes_size in ((SIZED, True), (UNSIZED, False)):
    for each in names.split():
        kind, _, pixels = each.partition("@")
        size = int(pixels or 32)
        values = {"img_size": size} if takes_size else {}
        make = functools.partial(of_timm, kind, size, values)
        TIMM.add(f"timm_{kind}", make, apart=False)


def of_torchvision(kind: str, size: int, values: dict[str, Any]) -> Any:
    need("torchvision")
    models = importlib.import_module("torchvision.models")
    model = getattr(models, kind)(weights=None, num_classes=5, **values).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    images = torch.randn(BATCH, 3, size, size)
    return Classifier(model), (images, torch.arange(BATCH) % 5)


for kind, size in {
    "resnet18": 32,
    "mobilenet_v2": 32,
    "shufflenet_v2_x0_5": 32,
    "squeezenet1_1": 32,
    "mnasnet0_5": 32,
    "densenet121": 32,
}.items():
    TORCHVISION.add(
        f"torchvision_{kind}",
        functools.partial(of_torchvision, kind, size, {}),
        schedules=PIPELINES,
        apart=False,
    )


class Denoiser(nn.Module):
    """The mean square of what a diffusion model predicts."""

    def __init__(self, inner: nn.Module, **more: Any) -> None:
        super().__init__()
        self.inner, self.more = inner, more

    def forward(self, noise: Tensor, sample: Tensor, **inputs: Tensor) -> Tensor:
        out = self.inner(sample, **inputs, **self.more, return_dict=False)[0]
        return (out - noise).pow(2).mean()


def denoiser(kind: str, values: dict[str, Any], **inputs: Any) -> Any:
    need("diffusers")
    models = importlib.import_module("diffusers")
    model = getattr(models, kind)(**values).train()
    for each in model.modules():
        if hasattr(each, "dropout_prob"):
            each.dropout_prob = 0.0  # of labels: as dropout, drawn for a microbatch
    sample = torch.randn(BATCH, values.get("in_channels", 4), 8, 8)
    given = {
        name: torch.arange(BATCH) if shape is None else torch.randn(BATCH, *shape)
        for name, shape in inputs.items()
    }
    return Denoiser(model), {
        "noise": torch.randn_like(sample),
        "sample": sample,
        **given,
    }


BLOCKS = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
SIZED = {"sample_size": 8, "in_channels": 4, "out_channels": 4}
DIFFUSERS.add(
    "unet_2d",
    functools.partial(
        denoiser,
        "UNet2DModel",
        SIZED
        | BLOCKS
        | {
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 4,
        },
        timestep=None,
    ),
)
DIFFUSERS.add(
    "unet_2d_condition",
    functools.partial(
        denoiser,
        "UNet2DConditionModel",
        SIZED
        | BLOCKS
        | {
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "cross_attention_dim": 16,
            "attention_head_dim": 2,
        },
        timestep=None,
        encoder_hidden_states=(5, 16),
    ),
)
TRANSFORMER = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
}
DIFFUSERS.add(
    "sd3",
    functools.partial(
        denoiser,
        "SD3Transformer2DModel",
        TRANSFORMER
        | {
            "joint_attention_dim": 16,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 16,
        },
        timestep=None,
        encoder_hidden_states=(5, 16),
        pooled_projections=(16,),
    ),
)
DIFFUSERS.add(
    "pixart",
    functools.partial(
        denoiser,
        "PixArtTransformer2DModel",
        TRANSFORMER
        | {"cross_attention_dim": 16, "caption_channels": 16, "norm_num_groups": 4}
        | {"use_additional_conditions": False},
        timestep=None,
        encoder_hidden_states=(5, 16),
    ),
)


DIFFUSERS.add(
    "dit",
    functools.partial(
        denoiser,
        "DiTTransformer2DModel",
        TRANSFORMER | {"num_embeds_ada_norm": 10, "norm_num_groups": 4},
        timestep=None,
        class_labels=None,
    ),
)
DIFFUSERS.add(
    "aura_flow",
    functools.partial(
        denoiser,
        "AuraFlowTransformer2DModel",
        {key: value for key, value in TRANSFORMER.items() if key != "num_layers"}
        | {"num_mmdit_layers": 1, "num_single_dit_layers": 1, "pos_embed_max_size": 64}
        | {"joint_attention_dim": 16, "caption_projection_dim": 16},
        timestep=None,
        encoder_hidden_states=(5, 16),
    ),
)
DIFFUSERS.add(
    "sana",
    functools.partial(
        denoiser,
        "SanaTransformer2DModel",
        TRANSFORMER
        | {"patch_size": 1, "cross_attention_dim": 16, "caption_channels": 16}
        | {"num_cross_attention_heads": 2, "cross_attention_head_dim": 8},
        timestep=None,
        encoder_hidden_states=(5, 16),
    ),
)
DIFFUSERS.add(
    "transformer_2d",
    functools.partial(
        denoiser,
        "Transformer2DModel",
        {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}
        | {"in_channels": 16, "norm_num_groups": 4, "cross_attention_dim": 16},
        encoder_hidden_states=(5, 16),
    ),
)


class Prior(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, time: Tensor, image: Tensor, text: Tensor) -> Tensor:
        out = self.inner(x, time, image, text, return_dict=False)[0]
        return (out - image).pow(2).mean()


@DIFFUSERS()
def prior() -> tuple[nn.Module, Inputs]:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}
    inner = need("diffusers").PriorTransformer(
        **sizes, embedding_dim=16, num_embeddings=5, additional_embeddings=4
    )
    x, image, text = torch.randn(BATCH, 16), torch.randn(BATCH, 16), (BATCH, 5, 16)
    return Prior(inner), (x, torch.arange(BATCH), image, torch.randn(text))


class Restored(nn.Module):
    """The mean square of what an autoencoder doesn't restore."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x, return_dict=False)[0] - x).pow(2).mean()


BLOCKS_OF = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
AUTOENCODERS = {
    "AutoencoderTiny": {
        "encoder_block_out_channels": (8, 8),
        "decoder_block_out_channels": (8, 8),
        "num_encoder_blocks": (1, 1),
        "num_decoder_blocks": (1, 1),
    },
    "VQModel": BLOCKS
    | BLOCKS_OF
    | {"num_vq_embeddings": 16, "vq_embed_dim": 4, "latent_channels": 4},
    "AsymmetricAutoencoderKL": BLOCKS_OF
    | {"down_block_out_channels": (8, 16), "up_block_out_channels": (8, 16)}
    | {"layers_per_down_block": 1, "layers_per_up_block": 1, "norm_num_groups": 4},
}


def restored(kind: str) -> tuple[nn.Module, Inputs]:
    inner = getattr(need("diffusers"), kind)(**AUTOENCODERS[kind]).train()
    return Restored(inner), (torch.randn(BATCH, 3, 8, 8),)


for kind in AUTOENCODERS:
    DIFFUSERS.add(kind, functools.partial(restored, kind))


class Autoencoder(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        latent = self.inner.encode(x, return_dict=False)[0].mode()
        return (self.inner.decode(latent, return_dict=False)[0] - x).pow(2).mean()


@DIFFUSERS()
def autoencoder_kl() -> tuple[nn.Module, Inputs]:
    models = need("diffusers")
    inner = models.AutoencoderKL(**BLOCKS, **BLOCKS_OF)
    return Autoencoder(inner), (torch.randn(BATCH, 3, 8, 8),)
