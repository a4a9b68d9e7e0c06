"""Models of transformers that read sound or time series."""

from __future__ import annotations

from typing import Any

import torch

from .case import BATCH, PIPELINES, Inputs, Zoo
from .cases_seq2seq import BART
from .hf import SIZES, add, answers, tokens

AUDIO = Zoo("audio")
WAVES: dict[str, Any] = {
    **SIZES,
    "conv_dim": [16, 16],
    "conv_kernel": [4, 4],
    "conv_stride": [4, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
    "apply_spec_augment": False,
    "feat_extract_norm": "layer",
    "do_stable_layer_norm": True,
}


def classified_sound(model: Any) -> Inputs:
    """A sound each, for models whose convolutions are frozen, as fine-tuning does."""
    if hasattr(model, "freeze_feature_encoder"):
        model.freeze_feature_encoder()
    return {"input_values": torch.randn(BATCH, 160), "labels": answers()}


def spoken(model: Any) -> Inputs:
    return {"input_features": torch.randn(BATCH, 8, 40), "labels": tokens(6)}


for name, kind in {
    "wav2vec2": "Wav2Vec2",
    "hubert": "Hubert",
    "wavlm": "WavLM",
    "unispeech": "UniSpeech",
    "unispeech_sat": "UniSpeechSat",
    "data2vec_audio": "Data2VecAudio",
    "sew": "SEW",
    "sew_d": "SEWD",
    "wav2vec2_conformer": "Wav2Vec2Conformer",
}.items():
    add(
        AUDIO,
        name,
        f"{kind}ForSequenceClassification",
        classified_sound,
        WAVES | ({"squeeze_factor": 2} if name.startswith("sew") else {}),
        schedules=PIPELINES,
        apart=name not in ("wav2vec2_conformer",),
    )
add(
    AUDIO,
    "whisper",
    "WhisperForConditionalGeneration",
    spoken,
    BART | {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 20},
)
add(
    AUDIO,
    "whisper_encoder",
    "WhisperForAudioClassification",
    lambda model: {"input_features": torch.randn(BATCH, 8, 40), "labels": answers()},
    BART | {"num_mel_bins": 8, "max_source_positions": 20, "num_labels": 5},
)
add(
    AUDIO,
    "speech_to_text",
    "Speech2TextForConditionalGeneration",
    lambda model: {"input_features": torch.randn(BATCH, 16, 8), "labels": tokens(6)},
    BART
    | {
        "input_feat_per_channel": 8,
        "conv_channels": 16,
        "max_source_positions": 32,
        "max_target_positions": 32,
    },
)
add(
    AUDIO,
    "audio_spectrogram",
    "ASTForAudioClassification",
    lambda model: {"input_values": torch.randn(BATCH, 24, 16), "labels": answers()},
    SIZES
    | {
        "max_length": 24,
        "num_mel_bins": 16,
        "patch_size": 4,
        "frequency_stride": 4,
        "time_stride": 4,
    },
)
SERIES: dict[str, Any] = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2],
    "num_time_features": 1,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
}


def series(model: Any) -> Inputs:
    past, future = 8 + 2, 4
    return {
        "past_values": torch.randn(BATCH, past),
        "past_time_features": torch.randn(BATCH, past, 1),
        "past_observed_mask": torch.ones(BATCH, past),
        "future_values": torch.randn(BATCH, future),
        "future_time_features": torch.randn(BATCH, future, 1),
    }


for name, kind in {
    "time_series_transformer": "TimeSeriesTransformer",
    "informer": "Informer",
}.items():
    add(
        AUDIO,
        name,
        f"{kind}ForPrediction",
        series,
        SERIES,
        schedules=PIPELINES,
        apart=False,
    )
PATCHES: dict[str, Any] = {
    "num_input_channels": 2,
    "context_length": 16,
    "prediction_length": 4,
    "patch_length": 4,
    "patch_stride": 4,
    "d_model": 16,
    "ffn_dim": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_layers": 2,
}


def channels(model: Any) -> Inputs:
    return {
        "past_values": torch.randn(BATCH, 16, 2),
        "future_values": torch.randn(BATCH, 4, 2),
    }


for name, kind in {"patchtst": "PatchTST", "patchtsmixer": "PatchTSMixer"}.items():
    add(
        AUDIO,
        name,
        f"{kind}ForPrediction",
        channels,
        PATCHES,
        schedules=PIPELINES,
        apart=False,
    )
