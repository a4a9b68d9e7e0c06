"""Encoders and decoders of transformers, from text to text."""

from __future__ import annotations

from typing import Any

from .case import Zoo
from .hf import SIZES, VOCABULARY, add, translated

SEQ2SEQ = Zoo("seq2seq")
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 37,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
BART: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 37,
    "decoder_ffn_dim": 37,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", T5),
    "t5_gated": ("T5", T5 | {"feed_forward_proj": "gated-gelu"}),
    "mt5": ("MT5", T5),
    "umt5": ("UMT5", T5),
    "longt5": ("LongT5", T5 | {"local_radius": 3, "encoder_attention_type": "local"}),
    "switch_transformers": (
        "SwitchTransformers",
        T5 | {"num_experts": 4, "num_sparse_encoder_layers": 1},
    ),
    "bart": ("Bart", BART),
    "mbart": ("MBart", BART),
    "pegasus": ("Pegasus", BART),
    "pegasus_x": ("PegasusX", BART | {"block_size": 4, "num_global_tokens": 2}),
    "marian": ("MarianMTModel", BART),
    "m2m_100": ("M2M100", BART),
    "blenderbot": ("Blenderbot", BART),
    "blenderbot_small": ("BlenderbotSmall", BART),
    "plbart": ("PLBart", BART),
    "mvp": ("Mvp", BART),
    "led": ("LED", BART | {"attention_window": 4}),
    "bigbird_pegasus": ("BigBirdPegasus", BART | {"attention_type": "original_full"}),
    "prophetnet": (
        "ProphetNet",
        {
            **{k: v for k, v in SIZES.items() if k != "num_hidden_layers"},
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "encoder_ffn_dim": 37,
            "decoder_ffn_dim": 37,
            "decoder_start_token_id": 1,
        },
    ),
    "nllb_moe": ("NllbMoe", BART | {"num_experts": 4, "encoder_sparse_step": 2}),
}
CONFIGS = {"marian": "MarianConfig"}
for name, (kind, values) in MODELS.items():
    kind = kind if kind.endswith("Model") else f"{kind}ForConditionalGeneration"
    add(
        SEQ2SEQ,
        name,
        kind,
        translated,
        values,
        CONFIGS.get(name),
        apart=name not in ("switch_transformers", "nllb_moe"),  # experts are balanced
    )
