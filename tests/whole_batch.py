"""Losses over the whole batch, trained: python -m tests.whole_batch [NAME ..].

Models whose loss is over all pairs of the batch, or a mean over labels that are not
padding: losses, outputs, gradients and the parameters after three steps of AdamW are
those of eager PyTorch on the whole batch, under each schedule, static and dynamic; so
are buffers, where BatchNorm sees the whole batch.
--ranks N runs the same over N processes; --only takes names of schedules, --pairs what
backend(pairs=) does. A row is
"equal" (with the largest difference, to the largest number) or an "error", with its
first lines. Ends with 1 if anything is not equal.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxsched
from fxsched import Direction, PlanError, Schedule, schedules
from fxsched.ir import request
from fxsched.ir.request import Order

from .broken_models import Row, Training, apart, doubled, hf_model, show
from .torchrun import again_on_ranks
from .whole_batch_models import SMALL, Normalised, Pairs, Ranking, Retrieval, Three
from .zoo import hf
from .zoo.case import BATCH
from .zoo.cases_multimodal import TOWERS, contrasted
from .zoo.cases_vision import VIT

Inputs = Mapping[str, Any]
TOLERANCE = 1e-5  # models are float64, but losses of transformers float32
STEPS = 3


def towers(kind: str) -> tuple[nn.Module, Inputs]:
    model = hf_model(f"{kind}Model", f"{kind}Config", **TOWERS)
    return model, contrasted(model)


def clap() -> tuple[nn.Module, Inputs]:
    sound: dict[str, Any] = {
        **{"num_mel_bins": 16, "window_size": 4, "spec_size": 64, "patch_size": 2},
        **{"patch_stride": 2, "hidden_size": 32, "patch_embeds_hidden_size": 16},
        **{"depths": [2, 2], "num_attention_heads": [2, 2], "num_hidden_layers": 2},
        **{"projection_dim": 16, "drop_path_rate": 0.0},
    }
    text = {**hf.SIZES, "projection_dim": 16}
    model = hf_model(
        *("ClapModel", "ClapConfig"),
        **{"text_config": text, "audio_config": sound, "projection_dim": 16},
    )
    features = torch.randn(BATCH, 1, 32, 16)
    return model, {
        "input_ids": hf.tokens(),
        "input_features": features,
        "return_loss": True,
    }


def flava() -> tuple[nn.Module, Inputs]:
    codebook: dict[str, Any] = {
        "num_groups": 2,
        "hidden_size": 8,
        "vocab_size": 16,
        "input_channels": 3,
    }
    model = hf_model(
        *("FlavaForPreTraining", "FlavaConfig"),
        **{"text_config": hf.SIZES, "image_config": {**VIT, "vocab_size": 16}},
        **{"multimodal_config": hf.SIZES, "image_codebook_config": codebook},
        **{"hidden_size": 32, "projection_dim": 16},
    )
    model.global_contrastive_head = Pairs()
    text = hf.tokens()
    return model, {
        "input_ids": text,
        "input_ids_masked": text,
        "pixel_values": hf.images(16),
        "codebook_pixel_values": hf.images(32),
        "bool_masked_pos": torch.randint(0, 2, (BATCH, 4, 4)),
        "mlm_labels": padded(text.clone()),
        "itm_labels": torch.arange(BATCH) % 2,
        "return_loss": True,
    }


def ranking() -> tuple[nn.Module, Inputs]:
    text = torch.randint(1, SMALL.vocabulary, (BATCH, SMALL.text_length))
    return Ranking(), {
        "image": torch.randn(BATCH, 1, SMALL.image_height, SMALL.image_width),
        "text": padded(text, 0),
        "audio": torch.randn(BATCH, SMALL.audio_frames, SMALL.audio_bins),
        "label": (torch.arange(BATCH) % 2).float(),
    }


def padded(labels: Tensor, padding: int = -100) -> Tensor:
    """Labels of which each row has another number."""
    for row, length in enumerate(range(len(labels))):
        labels[row, : length % labels.shape[1]] = padding
    return labels


def llama() -> tuple[nn.Module, Inputs]:
    sizes: dict[str, Any] = {**hf.SIZES, "num_key_value_heads": 2}
    model = hf_model("LlamaForCausalLM", "LlamaConfig", **sizes)
    return model, {"input_ids": (text := hf.tokens()), "labels": padded(text.clone())}


def llama_items() -> tuple[nn.Module, Inputs]:
    model, inputs = llama()
    return model, {**inputs, "num_items_in_batch": torch.tensor(29)}


def t5() -> tuple[nn.Module, Inputs]:
    sizes: dict[str, Any] = {
        "vocab_size": 99,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 37,
        "num_layers": 2,
    }
    model = hf_model(
        *("T5ForConditionalGeneration", "T5Config"),
        **{**sizes, "num_heads": 4, "decoder_start_token_id": 0},
    )
    return model, {"input_ids": hf.tokens(), "labels": padded(hf.tokens())}


MODELS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "clip": lambda: towers("CLIP"),
    "siglip": lambda: towers("Siglip"),
    "blip": lambda: towers("Blip"),
    "clap": clap,
    "flava": flava,
    "retrieval": lambda: (
        Retrieval(),
        {"queries": torch.randn(BATCH, 6), "candidates": torch.randn(BATCH, 3, 5)},
    ),
    "three": lambda: (
        Three(),
        {
            name: torch.randn(BATCH, n)
            for name, n in (("one", 4), ("two", 5), ("three", 6))
        },
    ),
    "three_encoder": ranking,
    "llama": llama,
    "llama items": llama_items,
    "t5": t5,
    "batch norm": lambda: (
        Normalised(),
        {
            "images": torch.randn(BATCH, 3, 8, 8),
            "labels": torch.arange(BATCH) % 5,
        },
    ),
}


def drawn(workers: int) -> Schedule:
    """Weights, jobs and their order at random places."""
    draw = random.Random(workers)
    jobs = [(s, b, d) for s in range(12) for b in range(4) for d in Direction]
    w = {job: (draw.randrange(workers), draw.randrange(workers)) for job in jobs}
    n = {job: draw.randrange(9) for job in jobs}
    return Schedule(
        *(workers, 4),
        stages=4,
        w=lambda s, b, d: w[s, b, d],
        n=lambda s, b, d: n[s, b, d],
        name="random",
    )


SCHEDULES: dict[str, Callable[[int], Schedule]] = {
    "ddp": lambda workers: schedules.ddp(workers, 4),
    "fsdp": lambda workers: schedules.fsdp(workers, 4),
    "gpipe": lambda workers: schedules.gpipe(workers, 4),
    "1f1b": lambda workers: schedules.one_f_one_b(workers, 4),
    "graph": lambda workers: schedules.graph(workers, 4),
    "bubble_filled": lambda workers: schedules.bubble_filled(workers, 4),
    "nested": lambda workers: schedules.nested(workers, 4),
    "zb_h1": lambda workers: schedules.zb_h1(workers, 4),
    "fslpp": lambda workers: schedules.fslpp(workers, 2, 4),
    "random": drawn,
}


def steps(call: Callable[..., Any], model: nn.Module, inputs: Inputs) -> Training:
    """Losses and outputs of some steps of AdamW, gradients of the last, parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    values: list[Tensor] = []
    gradients: dict[str, Tensor | None] = {}
    for _ in range(STEPS):
        optimizer.zero_grad()
        found = call(**inputs)
        tensors = [found] if isinstance(found, Tensor) else list(found.values())
        tensors[0].backward()
        values += [t.detach() for t in tensors if isinstance(t, Tensor)]
        gradients = {n: p.grad for n, p in model.named_parameters()}
        optimizer.step()
    return Training(values, gradients, fxsched.full_state_dict(model))


def compare(
    name: str, schedule: str, order: Order, workers: int, pairs: request.Pairs = "auto"
) -> Row:
    """Trains a model both ways, on equal weights."""
    start = time.perf_counter()
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    inputs = {key: doubled(value) for key, value in inputs.items()}
    eager = copy.deepcopy(model.double())
    torch._dynamo.reset()
    made = SCHEDULES[schedule](workers)
    step = fxsched.compile(model, made, order=order, pairs=pairs)
    try:
        difference = apart(steps(step, model, inputs), steps(eager, eager, inputs))
        kind = "equal" if difference < TOLERANCE else "differs"
        detail = f"{difference:.1e}"
    except PlanError as error:
        kind, detail = "error", "\n".join(str(error).split("\n")[:4])
    step.close()
    seconds = time.perf_counter() - start
    return Row(name, f"{schedule}, {order}", kind, "", detail, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.whole_batch")
    parser.add_argument("names", nargs="*", help="models; all, if there are none")
    parser.add_argument("--only", nargs="+", default=list(SCHEDULES))
    parser.add_argument("--ranks", type=int, default=0, help="processes; 0 is threads")
    parser.add_argument("--pairs", choices=get_args(request.Pairs), default="auto")
    options = parser.parse_args()
    if options.ranks and "RANK" not in os.environ:
        return again_on_ranks(options.ranks, "tests.whole_batch")
    if options.ranks:
        dist.init_process_group("gloo")
    rows = []
    orders: tuple[Order, ...] = ("static", "dynamic")
    for name in options.names or list(MODELS):
        for schedule in options.only:
            for order in orders:
                workers, pairs = options.ranks or 2, options.pairs
                rows.append(compare(name, schedule, order, workers, pairs))
                if os.environ.get("RANK", "0") == "0":
                    print(name, schedule, order, rows[-1].kind, flush=True)
    if os.environ.get("RANK", "0") == "0":
        print(show(rows))
    return int(any(row.kind != "equal" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
