"""Decoders of transformers that predict the next token."""

from __future__ import annotations

from typing import Any

from .case import Zoo
from .hf import SIZES, add, next_token

DECODERS = Zoo("decoders")
GROUPED = {**SIZES, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 8}
EXPERTS = {  # grouped products want rows of a multiple of 16 bytes
    **HEADS,
    "intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
OLD = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 99}
OLD |= {"bos_token_id": 1, "eos_token_id": 2}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GROUPED),
    "mistral": ("Mistral", GROUPED),
    "mistral_sliding": ("Mistral", {**GROUPED, "sliding_window": 4}),
    "ministral": ("Ministral", HEADS),
    "qwen2": ("Qwen2", GROUPED),
    "qwen3": ("Qwen3", HEADS),
    "gemma": ("Gemma", HEADS),
    "gemma2": ("Gemma2", HEADS | {"sliding_window": 4, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3", HEADS | {"sliding_window": 4, "query_pre_attn_scalar": 8}),
    "vaultgemma": ("VaultGemma", HEADS),
    "phi": ("Phi", GROUPED),
    "phi3": ("Phi3", GROUPED),
    "gpt2": ("GPT2LMHeadModel", OLD),
    "gpt_neo": (
        "GPTNeo",
        {
            **SIZES,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
        },
    ),
    "gpt_neox": ("GPTNeoX", SIZES),
    "gpt_neox_japanese": ("GPTNeoXJapanese", SIZES),
    "gptj": ("GPTJ", OLD | {"rotary_dim": 4}),
    "codegen": ("CodeGen", OLD | {"rotary_dim": 4}),
    "gpt_bigcode": ("GPTBigCode", OLD),
    "opt": ("OPT", {**SIZES, "ffn_dim": 37, "word_embed_proj_dim": 32}),
    "bloom": ("Bloom", {**SIZES, "n_layer": 2, "n_head": 4}),
    "falcon": ("Falcon", SIZES),
    "mpt": (
        "Mpt",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "vocab_size": 99,
        },
    ),
    "stablelm": ("StableLm", GROUPED),
    "starcoder2": ("Starcoder2", GROUPED),
    "olmo": ("Olmo", GROUPED),
    "olmo2": ("Olmo2", GROUPED),
    "olmo3": ("Olmo3", GROUPED | {"sliding_window": 4}),
    "cohere": ("Cohere", GROUPED),
    "cohere2": ("Cohere2", HEADS | {"sliding_window": 4}),
    "granite": ("Granite", GROUPED),
    "helium": ("Helium", HEADS),
    "nemotron": ("Nemotron", HEADS),
    "persimmon": ("Persimmon", SIZES),
    "xglm": (
        "XGLM",
        {**SIZES, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 37},
    ),
    "biogpt": ("BioGpt", SIZES),
    "glm": ("Glm", HEADS),
    "glm4": ("Glm4", HEADS),
    "smollm3": ("SmolLM3", GROUPED),
    "ernie4_5": ("Ernie4_5", HEADS),
    "exaone4": ("Exaone4", HEADS | {"sliding_window": 4}),
    "arcee": ("Arcee", GROUPED),
    "apertus": ("Apertus", GROUPED),
    "bitnet": ("BitNet", GROUPED),
    "seed_oss": ("SeedOss", HEADS),
    "hunyuan": ("HunYuanDenseV1", HEADS),
    "diffllama": ("DiffLlama", GROUPED),
    "nanochat": ("NanoChat", GROUPED),
    "modernbert_decoder": ("ModernBertDecoder", SIZES),
    "mixtral": ("Mixtral", EXPERTS),
    "qwen2_moe": ("Qwen2Moe", EXPERTS),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "olmoe": ("Olmoe", EXPERTS),
    "granitemoe": ("GraniteMoe", EXPERTS),
    "gpt_oss": ("GptOss", EXPERTS | {"sliding_window": 4}),
    "phimoe": (
        "Phimoe",
        EXPERTS | {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    ),
    "jetmoe": ("JetMoe", EXPERTS | {"kv_channels": 8, "num_key_value_heads": 2}),
    "dbrx": (
        "Dbrx",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "vocab_size": 99,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "mamba": ("Mamba", {**SIZES, "state_size": 4, "conv_kernel": 3, "expand": 2}),
    "mamba2": (
        "Mamba2",
        {
            **SIZES,
            "state_size": 4,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "chunk_size": 4,
        },
    ),
    "falcon_mamba": ("FalconMamba", {**SIZES, "state_size": 4, "conv_kernel": 3}),
    "recurrent_gemma": (
        "RecurrentGemma",
        HEADS | {"lru_width": 32, "attention_window_size": 8, "use_cache": False},
    ),
    "rwkv": ("Rwkv", {**SIZES, "attention_hidden_size": 32, "context_length": 16}),
    "lfm2": ("Lfm2", GROUPED | {"layer_types": ["conv", "full_attention"]}),
    "openai_gpt": ("OpenAIGPTLMHeadModel", OLD),
    "ctrl": ("CTRLLMHeadModel", OLD | {"dff": 37}),
    "xlnet": (
        "XLNetLMHeadModel",
        {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 37, "vocab_size": 99},
    ),
    "xlm": (
        "XLMWithLMHeadModel",
        {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 99, "n_words": 99},
    ),
}
CONFIGS = {
    "gemma3": "Gemma3TextConfig",
    "gpt2": "GPT2Config",
    "openai_gpt": "OpenAIGPTConfig",
    "ctrl": "CTRLConfig",
    "xlnet": "XLNetConfig",
    "xlm": "XLMConfig",
}

for name, (kind, values) in MODELS.items():
    kind = kind if kind.endswith("Model") else f"{kind}ForCausalLM"
    add(DECODERS, name, kind, next_token, values, CONFIGS.get(name))
