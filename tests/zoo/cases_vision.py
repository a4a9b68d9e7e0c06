"""Models of transformers that read images or videos."""

from __future__ import annotations

from typing import Any

import torch

from .case import BATCH, PIPELINES, Inputs, Zoo
from .hf import LABELS, WIDTH, add, answers, classified_image, images, only_image

VISION = Zoo("vision")
VIT: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": LABELS,
}
HIERARCHY: dict[str, Any] = {"image_size": 32, "num_labels": LABELS}
DEPTHS = {**HIERARCHY, "depths": [1, 1], "num_stages": 2}
SWIN = {
    **HIERARCHY,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 1],
    "num_heads": [2, 4],
    "window_size": 4,
}
FOUR = {"depths": [1, 1, 1, 1], "num_labels": LABELS, "image_size": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViT", VIT),
    "deit": ("DeiT", VIT),
    "beit": ("Beit", VIT | {"use_relative_position_bias": True}),
    "data2vec_vision": ("Data2VecVision", VIT),
    "dinov2": ("Dinov2", VIT),
    "dinov2_with_registers": ("Dinov2WithRegisters", VIT),
    "vit_msn": ("ViTMSN", VIT),
    "ijepa": ("IJepa", VIT),
    "swin": ("Swin", SWIN),
    "swinv2": ("Swinv2", SWIN),
    "donut_swin": ("DonutSwin", SWIN),
    "convnext": ("ConvNext", {**DEPTHS, "hidden_sizes": [8, 16]}),
    "convnextv2": ("ConvNextV2", {**DEPTHS, "hidden_sizes": [8, 16]}),
    "focalnet": (
        "FocalNet",
        {
            **HIERARCHY,
            "patch_size": 2,
            "embed_dim": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "focal_levels": [2, 2],
            "focal_windows": [3, 3],
        },
    ),
    "segformer": (
        "Segformer",
        {**FOUR, "hidden_sizes": [8, 8, 16, 16], "decoder_hidden_size": 16},
    ),
    "pvt": (
        "Pvt",
        {
            **FOUR,
            "hidden_sizes": [8, 8, 16, 16],
            "num_attention_heads": [1, 2, 2, 4],
        },
    ),
    "pvt_v2": (
        "PvtV2",
        {
            **FOUR,
            "hidden_sizes": [8, 8, 16, 16],
            "num_attention_heads": [1, 2, 2, 4],
        },
    ),
    "poolformer": (
        "PoolFormer",
        {**FOUR, "hidden_sizes": [8, 8, 16, 16], "num_channels": 3},
    ),
    "hiera": (
        "Hiera",
        {
            "image_size": [64, 64],
            "patch_kernel": [7, 7],
            "patch_stride": [4, 4],
            "patch_padding": [3, 3],
            "masked_unit_size": [4, 4],
            "embed_dim": 8,
            "num_layers": 2,
            "depths": [1, 1],
            "num_heads": [1, 2],
            "query_stride": [2, 2],
            "num_query_pool": 1,
            "num_labels": LABELS,
        },
    ),
    "siglip_vision": ("Siglip", {"vision_config": VIT, "num_labels": LABELS}),
    "clip_vision": ("CLIP", {"vision_config": VIT, "num_labels": LABELS}),
}
NORMED: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet": (
        "ResNet",
        {
            **HIERARCHY,
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "layer_type": "basic",
        },
    ),
    "resnet_bottleneck": (
        "ResNet",
        {**HIERARCHY, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2]},
    ),
    "regnet": (
        "RegNet",
        {
            **HIERARCHY,
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "groups_width": 4,
        },
    ),
    "mobilenet_v1": ("MobileNetV1", {**HIERARCHY, "depth_multiplier": 0.25}),
    "mobilenet_v2": ("MobileNetV2", {**HIERARCHY, "depth_multiplier": 0.25}),
    "mobilevit": (
        "MobileViT",
        {
            **HIERARCHY,
            "hidden_sizes": [16, 16, 16],
            "neck_hidden_sizes": [8, 8, 8, 8, 16, 16, 16],
            "num_attention_heads": 2,
        },
    ),
    "mobilevitv2": (
        "MobileViTV2",
        {**HIERARCHY, "image_size": 64, "width_multiplier": 0.25},
    ),
    "levit": (
        "Levit",
        {
            **HIERARCHY,
            "hidden_sizes": [16, 16, 16],
            "num_attention_heads": [1, 1, 1],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
        },
    ),
    "swiftformer": (
        "SwiftFormer",
        {
            **HIERARCHY,
            "image_size": 64,
            "depths": [1, 1, 1, 1],
            "embed_dims": [8, 8, 16, 16],
        },
    ),
    "bit": (
        "Bit",
        {
            **HIERARCHY,
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "num_groups": 4,
        },
    ),
}
for name, (kind, values) in MODELS.items():
    add(VISION, name, f"{kind}ForImageClassification", classified_image, values)
for name, (kind, values) in NORMED.items():
    add(
        VISION,
        name,
        f"{kind}ForImageClassification",
        classified_image,
        values,
        schedules=PIPELINES,
        apart=False,
    )


def film(model: Any) -> Inputs:
    frames = torch.randn(BATCH, model.config.num_frames, 3, 16, 16)
    return {"pixel_values": frames, "labels": answers()}


FILM = VIT | {"num_frames": 4, "tubelet_size": 2}
add(
    VISION,
    "videomae",
    "VideoMAEForVideoClassification",
    film,
    FILM | {"use_mean_pooling": True},
)
add(
    VISION,
    "vivit",
    "VivitForVideoClassification",
    film,
    FILM | {"tubelet_size": [2, 4, 4]},
)
add(VISION, "timesformer", "TimesformerForVideoClassification", film, FILM)


def segmented(model: Any) -> Inputs:
    size = model.config.image_size
    labels = torch.randint(0, LABELS, (BATCH, size, size))
    return {"pixel_values": images(size), "labels": labels}


add(
    VISION,
    "segformer_pixels",
    "SegformerForSemanticSegmentation",
    segmented,
    MODELS["segformer"][1],
    schedules=PIPELINES,
    apart=False,
)
add(
    VISION,
    "dpt",
    "DPTForSemanticSegmentation",
    segmented,
    {
        **VIT,
        "num_hidden_layers": 4,
        "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [8, 8, 8, 8],
        "fusion_hidden_size": 8,
        "reassemble_factors": [4, 2, 1, 0.5],
    },
    schedules=PIPELINES,
    apart=False,
)
add(
    VISION,
    "glpn",
    "GLPNForDepthEstimation",
    lambda model: {"pixel_values": images(32), "labels": torch.rand(BATCH, 32, 32)},
    {
        "depths": [1, 1, 1, 1],
        "hidden_sizes": [8, 8, 16, 16],
        "decoder_hidden_size": 16,
        "num_attention_heads": [1, 2, 2, 4],
    },
    schedules=PIPELINES,
    apart=False,
)
add(VISION, "yolos", "YolosModel", only_image, VIT | {"image_size": [16, 16]})
add(VISION, "vit_masked", "ViTModel", only_image, VIT)
add(
    VISION,
    "dinov3_vit",
    "DINOv3ViTModel",
    only_image,
    VIT | {"pos_embed_rescale": None},  # drawn anew for each batch
)
add(
    VISION,
    "swin2sr",
    "Swin2SRForImageSuperResolution",
    lambda model: {"pixel_values": images(16)},
    {
        "image_size": 16,
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [2, 2],
        "window_size": 4,
        "upscale": 2,
        "patch_size": 1,
    },
)
