"""Models of transformers with more than one kind of input, and decision makers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .case import BATCH, Inputs, Zoo
from .cases_vision import VIT
from .hf import LENGTH, SIZES, add, answers, images, still, tokens, without_dropout

MULTIMODAL = Zoo("multimodal")
TEXT: dict[str, Any] = {**SIZES, "projection_dim": 16}
TOWERS: dict[str, Any] = {
    "text_config": TEXT,
    "vision_config": VIT | {"projection_dim": 16},
    "projection_dim": 16,
}


def captioned(model: Any) -> Inputs:
    text = tokens()
    text[:, -1] = 2
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    return {"input_ids": text, "attention_mask": mask, "pixel_values": images(16)}


def contrasted(model: Any) -> Inputs:
    return {**captioned(model), "return_loss": True}


for name, kind in {
    "clip": "CLIP",
    "siglip": "Siglip",
    "chinese_clip": "ChineseCLIP",
    "altclip": "AltCLIP",
    "blip": "Blip",
    "metaclip_2": "MetaClip2",
}.items():
    add(MULTIMODAL, name, f"{kind}Model", contrasted, TOWERS, apart=False)
    if name not in ("siglip2",):
        add(
            MULTIMODAL, f"{name}_scores", f"{kind}Model", captioned, TOWERS, apart=False
        )


class ClipTowers(nn.Module):
    """CLIP's two towers, and a head: whether text and image belong together."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        self.text = still(
            transformers.CLIPTextModel(
                without_dropout(transformers.CLIPTextConfig(**TEXT))
            )
        )
        self.vision = still(
            transformers.CLIPVisionModel(
                without_dropout(transformers.CLIPVisionConfig(**VIT))
            )
        )
        self.head = nn.Linear(64, 1)

    def forward(
        self, input_ids: Tensor, pixel_values: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        text = self.text(input_ids=input_ids).pooler_output
        image = self.vision(pixel_values=pixel_values).pooler_output
        score = self.head(torch.cat([text, image], 1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(score, labels)
        return loss, score


@MULTIMODAL()
def clip_towers() -> tuple[nn.Module, Inputs]:
    labels = torch.arange(BATCH) % 2.0
    return ClipTowers(), {
        "input_ids": tokens(),
        "pixel_values": images(16),
        "labels": labels,
    }


def answered(model: Any) -> Inputs:
    return {
        "input_ids": tokens(),
        "visual_feats": torch.randn(BATCH, 6, 16),
        "visual_pos": torch.rand(BATCH, 6, 4),
        "labels": answers(),
    }


add(
    MULTIMODAL,
    "lxmert",
    "LxmertForQuestionAnswering",
    answered,
    SIZES
    | {
        "num_qa_labels": 5,
        "l_layers": 1,
        "r_layers": 1,
        "x_layers": 1,
        "visual_feat_dim": 16,
    },
)
add(
    MULTIMODAL,
    "visual_bert",
    "VisualBertModel",
    lambda model: {
        "input_ids": tokens(),
        "visual_embeds": torch.randn(BATCH, 6, 16),
        "visual_attention_mask": torch.ones(BATCH, 6),
    },
    SIZES | {"visual_embedding_dim": 16},
)
add(
    MULTIMODAL,
    "vilt",
    "ViltModel",
    captioned,
    SIZES | {"image_size": 16, "patch_size": 4},
)
add(
    MULTIMODAL,
    "layoutlmv3",
    "LayoutLMv3ForSequenceClassification",
    lambda model: {
        "input_ids": tokens(),
        "bbox": torch.ones(BATCH, LENGTH, 4, dtype=torch.int64),
        "pixel_values": images(16),
        "labels": answers(),
    },
    SIZES
    | {
        "input_size": 16,
        "patch_size": 4,
        "coordinate_size": 4,
        "shape_size": 8,
        "max_2d_position_embeddings": 32,
    },
)
add(
    MULTIMODAL,
    "owlvit",
    "OwlViTModel",
    captioned,
    TOWERS,
    apart=False,
)
add(
    MULTIMODAL,
    "clipseg",
    "CLIPSegForImageSegmentation",
    lambda model: {**captioned(model), "labels": torch.rand(BATCH, 16, 16)},
    TOWERS | {"reduce_dim": 16, "extract_layers": [0, 1]},
)
add(
    MULTIMODAL,
    "git",
    "GitForCausalLM",
    lambda model: {
        "input_ids": tokens(),
        "pixel_values": images(16),
        "labels": tokens(),
    },
    SIZES | {"vision_config": VIT},
)


def with_image(model: Any) -> Inputs:
    text = tokens(20)
    text[:, :16] = 90
    return {"input_ids": text, "pixel_values": images(16), "labels": text}


LLAVA: dict[str, Any] = {
    "text_config": {**SIZES, "model_type": "llama", "num_key_value_heads": 2},
    "vision_config": {**VIT, "model_type": "clip_vision_model"},
    "image_token_id": 90,
    "image_token_index": 90,
    "vision_feature_layer": -1,
}
add(MULTIMODAL, "llava", "LlavaForConditionalGeneration", with_image, LLAVA)
add(
    MULTIMODAL,
    "vision_encoder_decoder",
    "TrOCRForCausalLM",
    lambda model: {"input_ids": (text := tokens()), "labels": text},
    {
        "vocab_size": 99,
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 37,
        "max_position_embeddings": 64,
        "is_decoder": True,
    },
)


def decided(model: Any) -> Inputs:
    return {
        "states": torch.randn(BATCH, 6, 7),
        "actions": torch.randn(BATCH, 6, 3),
        "rewards": torch.randn(BATCH, 6, 1),
        "returns_to_go": torch.randn(BATCH, 6, 1),
        "timesteps": torch.arange(6).repeat(BATCH, 1),
        "attention_mask": torch.ones(BATCH, 6),
    }


add(
    MULTIMODAL,
    "decision_transformer",
    "DecisionTransformerModel",
    decided,
    {
        "state_dim": 7,
        "act_dim": 3,
        "hidden_size": 32,
        "n_layer": 2,
        "n_head": 4,
        "max_ep_len": 20,
        "n_positions": 64,
    },
)
