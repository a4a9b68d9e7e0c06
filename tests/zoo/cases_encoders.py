"""Encoders of transformers that classify a text or fill in its masked tokens."""

from __future__ import annotations

from typing import Any

from .case import PIPELINES, SCHEDULES, Zoo
from .hf import SIZES, add, classified_text, masked_token

ENCODERS = Zoo("encoders")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {}),
    "roberta": ("Roberta", {}),
    "roberta_prelayernorm": ("RobertaPreLayerNorm", {}),
    "xlm_roberta": ("XLMRoberta", {}),
    "xlm_roberta_xl": ("XLMRobertaXL", {}),
    "camembert": ("Camembert", {}),
    "distilbert": (
        "DistilBert",
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 37},
    ),
    "albert": ("Albert", {"embedding_size": 16}),
    "electra": ("Electra", {"embedding_size": 16}),
    "deberta": ("Deberta", {"relative_attention": True, "pos_att_type": ["c2p"]}),
    "deberta_v2": (
        "DebertaV2",
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "mpnet": ("MPNet", {}),
    "squeezebert": (
        "SqueezeBert",
        {"embedding_size": 32, "intermediate_size": 64}
        | {f"{part}_groups": 2 for part in ("q", "k", "v")},
    ),
    "mobilebert": (
        "MobileBert",
        {
            "embedding_size": 32,
            "intra_bottleneck_size": 32,
            "true_hidden_size": 32,
            "num_feedforward_networks": 2,
        },
    ),
    "convbert": ("ConvBert", {"embedding_size": 32}),
    "rembert": ("RemBert", {"input_embedding_size": 16, "output_embedding_size": 16}),
    "roformer": ("RoFormer", {}),
    "nystromformer": (
        "Nystromformer",
        {"num_landmarks": 8, "segment_means_seq_len": 8},
    ),
    "ibert": ("IBert", {}),
    "ernie": ("Ernie", {}),
    "esm": ("Esm", {"mask_token_id": 4, "token_dropout": False}),
    "megatron_bert": ("MegatronBert", {}),
    "fnet": ("FNet", {}),
    "funnel": (
        "Funnel",
        {"block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 37},
    ),
    "canine": ("Canine", {"downsampling_rate": 2, "local_transformer_stride": 4}),
    "layoutlm": ("LayoutLM", {}),
    "luke": ("Luke", {"entity_vocab_size": 20, "entity_emb_size": 8}),
    "markuplm": ("MarkupLM", {}),
    "data2vec_text": ("Data2VecText", {}),
    "xmod": ("Xmod", {"languages": ["en"], "default_language": "en"}),
    "big_bird": ("BigBird", {"attention_type": "original_full"}),
    "longformer": ("Longformer", {"attention_window": 4}),
    "reformer": (
        "Reformer",
        {
            "axial_pos_embds": False,
            "attn_layers": ["local"] * 2,
            "local_attn_chunk_length": 4,
        }
        | {"attention_head_size": 8, "feed_forward_size": 37},
    ),
    "yoso": ("Yoso", {}),
    "modernbert": ("ModernBert", {"local_attention": 4, "reference_compile": False}),
    "nomic_bert": ("NomicBert", {}),
    "eurobert": ("EuroBert", {"num_key_value_heads": 4}),
    "roc_bert": ("RoCBert", {"enable_pronunciation": False, "enable_shape": False}),
    "lilt": ("Lilt", {"hidden_size": 48, "channel_shrink_ratio": 4}),
}
for name, (kind, values) in MODELS.items():
    sizes = SIZES | values
    if name == "funnel":
        del sizes["num_hidden_layers"]
    add(
        ENCODERS,
        name,
        f"{kind}ForSequenceClassification",
        classified_text,
        sizes,
        apart=name != "ibert",  # it quantizes by what it has seen
        schedules=PIPELINES if name == "ibert" else SCHEDULES,
    )
for name in ("bert", "electra", "deberta_v2", "modernbert", "fnet"):
    kind, values = MODELS[name]
    sizes = SIZES | values
    add(ENCODERS, f"{name}_masked", f"{kind}ForMaskedLM", masked_token, sizes)
