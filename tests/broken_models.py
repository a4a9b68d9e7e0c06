"""Models that Dynamo breaks, trained: python -m tests.broken_models [NAME ..].

Each trains by fxsched.compile for three steps of SGD with momentum, at two batch sizes,
by 1f1b, graph and fslpp, and beside it in plain PyTorch. A row is "equal" (with the
largest difference of losses, gradients and parameters, to the largest number in each)
or an "error", with its first lines. --ranks runs the same over two processes; --only
takes names of schedules. Ends with 1 if anything differs, if one of the five that must
train doesn't, or fewer than eight do.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, Schedule, schedules

from .torchrun import again_on_ranks
from .zoo import hf
from .zoo.case import BATCH
from .zoo.cases_audio import WAVES
from .zoo.cases_multimodal import LLAVA, captioned, with_image
from .zoo.cases_vision import FOUR, VIT

Inputs = Mapping[str, Any]
Make = Callable[[], tuple[nn.Module, Inputs]]
MUST = ("gpt2", "llava", "segformer", "wav2vec2", "lstm")
TOLERANCE = 1e-5  # models are float64, but losses of transformers float32
STEPS = (BATCH, BATCH // 2, BATCH)


def hf_model(kind: str, config: str, **values: Any) -> nn.Module:
    """A small random model of transformers, without dropout."""
    import transformers

    settings = getattr(transformers, config)(**values)
    model: nn.Module = getattr(transformers, kind)(hf.without_dropout(settings))
    for module in hf.still(model).train().modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()  # as one fine-tunes
    return model


class Recurrent(nn.Module):
    """Sequences, classified by a recurrent module's last state."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rows = kind(8, 16, 2, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        last = self.rows(x)[0][:, -1]
        return nn.functional.cross_entropy(self.head(last), labels)


def recurrent(kind: type[nn.RNNBase]) -> tuple[nn.Module, Inputs]:
    return Recurrent(kind), {"x": torch.randn(BATCH, 6, 8), "labels": hf.answers()}


def gpt2() -> tuple[nn.Module, Inputs]:
    sizes = {"vocab_size": 99, "n_embd": 32, "n_layer": 3, "n_head": 4}
    ends = {"n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}
    model = hf_model("GPT2LMHeadModel", "GPT2Config", **sizes, **ends)
    return model, hf.next_token(model)


def llava() -> tuple[nn.Module, Inputs]:
    model = hf_model("LlavaForConditionalGeneration", "LlavaConfig", **LLAVA)
    return model, with_image(model)


def paligemma() -> tuple[nn.Module, Inputs]:
    text = {**hf.SIZES, "model_type": "gemma", "num_key_value_heads": 2, "head_dim": 8}
    vision = {**VIT, "model_type": "siglip_vision_model", "projection_dim": 32}
    model = hf_model(
        *("PaliGemmaForConditionalGeneration", "PaliGemmaConfig"),
        **{"text_config": text, "vision_config": vision, "projection_dim": 32},
        **{"image_token_id": 90, "image_token_index": 90, "hidden_size": 32},
    )
    kinds = torch.ones(BATCH, 20, dtype=torch.int64)
    return model, {**with_image(model), "token_type_ids": kinds}


def segformer() -> tuple[nn.Module, Inputs]:
    model = hf_model(
        *("SegformerForSemanticSegmentation", "SegformerConfig"),
        **{**FOUR, "hidden_sizes": [8, 8, 16, 16], "decoder_hidden_size": 16},
    )
    labels = torch.randint(0, 5, (BATCH, 32, 32))
    return model, {"pixel_values": hf.images(32), "labels": labels}


def wav2vec2() -> tuple[nn.Module, Inputs]:
    model = hf_model("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", **WAVES)
    return model, {"input_values": torch.randn(BATCH, 160), "labels": hf.answers()}


def vilt() -> tuple[nn.Module, Inputs]:
    sizes = {**hf.SIZES, "image_size": 16, "patch_size": 4}
    model = hf_model("ViltForQuestionAnswering", "ViltConfig", **sizes)
    return model, {**captioned(model), "labels": torch.rand(BATCH, 5)}


def detr() -> tuple[nn.Module, Inputs]:
    backbone = {
        "model_type": "resnet",
        **{"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
        **{"layer_type": "basic", "out_features": ["stage2"]},
    }
    model = hf_model(
        *("DetrForObjectDetection", "DetrConfig"),
        **{"use_timm_backbone": False, "use_pretrained_backbone": False},
        **{"backbone": None, "backbone_config": backbone, "num_queries": 6},
        **{"d_model": 32, "encoder_layers": 1, "decoder_layers": 1},
        **{"encoder_ffn_dim": 37, "decoder_ffn_dim": 37},
        **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    )
    box = torch.tensor([[0.5, 0.5, 0.2, 0.2]])
    one = {"class_labels": torch.tensor([1]), "boxes": box}
    return model, {"pixel_values": hf.images(32), "labels": [one] * BATCH}


def longformer() -> tuple[nn.Module, Inputs]:
    sizes = {**hf.SIZES, "attention_window": 4}
    model = hf_model("LongformerForSequenceClassification", "LongformerConfig", **sizes)
    return model, hf.classified_text(model)


def deberta() -> tuple[nn.Module, Inputs]:
    sizes = {**hf.SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    sizes["problem_type"] = "single_label_classification"  # else it asks the labels
    model = hf_model("DebertaV2ForSequenceClassification", "DebertaV2Config", **sizes)
    return model, hf.classified_text(model)


def speecht5() -> tuple[nn.Module, Inputs]:
    model = hf_model(
        *("SpeechT5ForTextToSpeech", "SpeechT5Config"),
        **{"vocab_size": 99, "hidden_size": 32, "encoder_layers": 2},
        **{"decoder_layers": 2, "encoder_attention_heads": 4},
        **{"decoder_attention_heads": 4, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37},
        **{"speech_decoder_prenet_units": 16, "speech_decoder_postnet_units": 16},
        **{"num_mel_bins": 8, "speaker_embedding_dim": 16, "reduction_factor": 2},
        **{"use_guided_attention_loss": False},
    )
    sound, voice = torch.randn(BATCH, 12, 8), torch.randn(BATCH, 16)
    return model, {
        "input_ids": hf.tokens(),
        "labels": sound,
        "speaker_embeddings": voice,
    }


def mixtral() -> tuple[nn.Module, Inputs]:
    from .zoo.cases_decoders import EXPERTS

    model = hf_model(
        *("MixtralForCausalLM", "MixtralConfig"),
        **{**EXPERTS, "output_router_logits": True},
    )
    return model, hf.next_token(model)


MODELS: dict[str, Make] = {
    "gpt2": gpt2,
    "llava": llava,
    "paligemma": paligemma,
    "segformer": segformer,
    "wav2vec2": wav2vec2,
    "vilt": vilt,
    "detr": detr,
    "longformer": longformer,
    "deberta": deberta,
    "speecht5": speecht5,
    "mixtral": mixtral,
    "lstm": lambda: recurrent(nn.LSTM),
    "gru": lambda: recurrent(nn.GRU),
}
# An auxiliary loss is a product of means over the batch: here microbatches' own.
OPTIONS: dict[str, dict[str, Any]] = {
    "mixtral": {"outputs": {"aux_loss": "mean"}, "loss_reduction": "mean"}
}
SINGLE = {"mixtral": 2e-4}  # products of its experts are not of float64
SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "1f1b": lambda: schedules.one_f_one_b(2, 4),
    "graph": lambda: schedules.graph(2, 4),
    "fslpp": lambda: schedules.fslpp(2, 2, 4),
    "bubble_filled": lambda: schedules.bubble_filled(2, 4),
    "nested": lambda: schedules.nested(2, 4),
}


class Row(NamedTuple):
    """A line of the table. kind: "equal", "error" or "differs"."""

    name: str
    schedule: str
    kind: str
    way: str
    detail: str
    seconds: float


class Training(NamedTuple):
    """What some steps gave: losses, gradients of the last, and parameters."""

    losses: list[Tensor]
    gradients: dict[str, Tensor | None]
    parameters: dict[str, Tensor]


def rows_of(inputs: Any, rows: slice) -> Any:
    """Some rows of all tensors of a batch."""
    if isinstance(inputs, Tensor):
        return inputs[rows]
    if isinstance(inputs, Mapping):
        return {name: rows_of(value, rows) for name, value in inputs.items()}
    return inputs[rows]


def doubled(value: Any) -> Any:
    floats = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if floats else value


def train(
    call: Callable[..., Any], model: nn.Module, inputs: Inputs, microbatches: int = 1
) -> Training:
    """Steps of SGD with momentum at two batch sizes; of so many microbatches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, gradients = [], {}
    for rows in STEPS:
        parts = [rows_of(inputs, slice(rows))]
        if microbatches > 1:
            ends = range(0, rows, rows // microbatches)
            parts = [rows_of(inputs, slice(i, i + rows // microbatches)) for i in ends]
        found = [call(**part) for part in parts]
        values = [out if isinstance(out, Tensor) else out.loss for out in found]
        loss = torch.stack(values).mean()
        loss.backward()
        losses.append(loss.detach())
        gradients = {n: p.grad for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    state = fxsched.full_state_dict(model)
    return Training(losses, gradients, state)


def apart(found: Training, wanted: Training) -> float:
    """The largest difference of a value, to the largest number in it."""
    largest = 0.0
    pairs = [*zip(found.losses, wanted.losses, strict=True)]
    for mine, other in zip(found[1:], wanted[1:], strict=True):
        assert mine.keys() == other.keys()
        # a rank has gradients of what it keeps alone
        pairs += [(mine[n], other[n]) for n in mine if mine[n] is not None]
    for one, another in pairs:
        assert another is not None, "a gradient that eager lacks"
        if one.is_floating_point():
            scale = another.abs().max().clamp(min=1e-6)
            largest = max(largest, float((one - another).abs().max() / scale))
    return largest


def compare(name: str, schedule: str) -> Row:
    """Trains a model both ways."""
    start = time.perf_counter()
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    if name not in SINGLE:
        inputs = {key: doubled(value) for key, value in inputs.items()}
        model.double()
    eager = copy.deepcopy(model)
    options = OPTIONS.get(name, {})
    step = fxsched.compile(model, SCHEDULES[schedule](), **options)
    try:
        found = train(step, model, inputs)
        difference = apart(found, train(eager, eager, inputs, 4 if options else 1))
        kind = "equal" if difference < SINGLE.get(name, TOLERANCE) else "differs"
        detail = f"{difference:.1e}"
    except PlanError as error:
        kind, detail = "error", "\n".join(str(error).split("\n")[:4])
    step.close()
    way = step.captured_by.split(":")[0]
    return Row(name, schedule, kind, way, detail, time.perf_counter() - start)


def show(rows: Sequence[Row]) -> str:
    headers = [
        "model",
        "schedule",
        "",
        "captured by",
        "largest difference, or why",
        "s",
    ]
    cells = [(*row[:-1], f"{row.seconds:.1f}") for row in rows]
    return tabulate(cells, headers, maxcolwidths=[None] * 4 + [80, None])


def enough(rows: Sequence[Row]) -> bool:
    """Whether as many models train as must."""
    bad = {row.name for row in rows if row.kind != "equal"}
    trained = [row.name for row in rows if row.name not in bad]
    must = [name for name in MUST if name in MODELS]
    return all(name in trained for name in must) and len(set(trained)) >= 8


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.broken_models")
    parser.add_argument("names", nargs="*", help="models; all, if there are none")
    parser.add_argument("--only", nargs="+", default=list(SCHEDULES))
    parser.add_argument("--ranks", action="store_true", help="over two processes")
    options = parser.parse_args()
    if options.ranks and "RANK" not in os.environ:
        return again_on_ranks(2, "tests.broken_models")
    names = options.names or list(MODELS)
    rows = [compare(name, each) for name in names for each in options.only]
    if os.environ.get("RANK", "0") == "0":
        print(show(rows))
    differs = any(row.kind == "differs" for row in rows)
    return int(differs or (not options.names and not enough(rows)))


if __name__ == "__main__":
    sys.exit(main())
