"""Models that the tests cut into shards, with the names of what is cut, and what counts
of a plan."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from fxsched import Direction, Plan, Schedule, schedules
from fxsched.ir import ops
from fxsched.models.gpt import GPT, GPTConfig

from .cases import build
from .placement.test_expert_shards import Mixture, batch, modules, selected

BATCH, TOKENS = 8, 64
Words = dict[str, str]


class Case(NamedTuple):
    """A model to cut.

    make: gives a model that returns a loss, and a batch. layers: the prefixes of the
    names of its blocks' parameters. words: the names of what to cut. sums: how many all
    blocks have, two each, and one more where they read another sequence too. whole:
    eager takes the batch at once, whose rows meet. drops: with dropout, whose numbers
    are those of a schedule without shards, where eager has others. vocabulary: the
    names of what else is cut where a vocabulary is. even: 2 shards have half of the
    blocks each.
    """

    make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]
    layers: tuple[str, ...]
    words: Words
    sums: int | None = None
    whole: bool = False
    drops: bool = False
    vocabulary: Words | None = None
    even: bool = False


class Loss(nn.Module):
    """The loss of one of transformers' models, called with tensors in this order."""

    def __init__(self, model: nn.Module, *names: str, **fixed: Any) -> None:
        super().__init__()
        self.model, self.names, self.fixed = model, names, fixed

    def forward(self, *inputs: Tensor) -> Tensor:
        given = dict(zip(self.names, inputs, strict=True))
        loss: Tensor = self.model(**given, **self.fixed)[0]
        return loss


def text(*shape: int) -> Tensor:
    return torch.randint(3, TOKENS, shape)


def llama(
    heads: int, layers: int = 2, dropout: float = 0.0, tied: bool = False
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = transformers.LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=heads,
        attention_dropout=dropout,
        tie_word_embeddings=tied,
    )
    model = Loss(transformers.LlamaForCausalLM(config), "input_ids", "labels")
    words = text(BATCH, 10)
    return model, (words, words)


def mixtral() -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = transformers.MixtralConfig(
        vocab_size=TOKENS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=4,
    )
    model = Loss(transformers.MixtralForCausalLM(config), "input_ids", "labels")
    words = text(BATCH, 10)
    return model, (words, words)


def bert_config(
    layers: int, dropout: float = 0.0, attention: str = "sdpa"
) -> transformers.BertConfig:
    return transformers.BertConfig(
        vocab_size=TOKENS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_labels=5,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        attn_implementation=attention,
    )


def bert(
    layers: int = 2, dropout: float = 0.0, attention: str = "sdpa"
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = bert_config(layers, dropout, attention)
    mask = torch.ones(BATCH, 12, dtype=torch.int64)
    mask[::2, 9:] = 0
    model = transformers.BertForSequenceClassification(config)
    inputs = text(BATCH, 12), mask, torch.randint(5, (BATCH,))
    return Loss(model, "input_ids", "attention_mask", "labels"), inputs


def dropped_gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    model = GPT(GPTConfig(vocabulary=64, width=32, layers=1, dropout=0.2))
    return model, (text(BATCH, 16), text(BATCH, 16))


def masked_bert() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A BERT whose labels are ignored but for a few; all of the first rows are."""
    words, labels = text(BATCH, 12), text(BATCH, 12)
    labels[torch.rand(BATCH, 12) < 0.7] = -100
    labels[:2] = -100
    model = transformers.BertForMaskedLM(bert_config(layers=1))
    return Loss(model, "input_ids", "labels"), (words, labels)


class Encoder(nn.Module):
    """torch's own encoder, and a layer on top."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.2, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(x).mean(1)), label)


def dropped_encoder() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Encoder(), (torch.randn(BATCH, 6, 32), torch.randint(5, (BATCH,)))


def t5() -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = transformers.T5Config(
        vocab_size=TOKENS,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config)
    inputs = text(BATCH, 12), text(BATCH, 8)
    return Loss(model, "input_ids", "labels", use_cache=False), inputs


def vit() -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = transformers.ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = transformers.ViTForImageClassification(config)
    inputs = torch.randn(BATCH, 3, 16, 16), torch.randint(5, (BATCH,))
    return Loss(model, "pixel_values", "labels"), inputs


def clip() -> tuple[nn.Module, tuple[Tensor, ...]]:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = transformers.CLIPConfig(
        text_config={
            **sizes,
            "vocab_size": TOKENS,
            "max_position_embeddings": 16,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        vision_config={**sizes, "image_size": 16, "patch_size": 4},
        projection_dim=16,
    )
    model = transformers.CLIPModel(config)
    inputs = text(BATCH, 12), torch.randn(BATCH, 3, 16, 16)
    return Loss(model, "input_ids", "pixel_values", return_loss=True), inputs


def mixture(experts: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Mixture(experts), batch()


def named(columns: str, rows: str) -> Words:
    words = dict.fromkeys((f"*.{name}" for name in columns.split()), "column")
    return words | dict.fromkeys((f"*.{name}" for name in rows.split()), "row")


TIED = {"tokens": "row", "head": "column"}
TIED_LLAMA = {"*.embed_tokens": "row", "*.lm_head": "column"}
OWN = named("query key value feed.0", "out feed.2")
BERT = named("query key value intermediate.dense", "output.dense")
VIT = named("q_proj k_proj v_proj fc1", "o_proj fc2")
CHANNELS: Words = {
    **dict.fromkeys(("first.0", "down.*.0", "up.*.0"), "column"),
    **dict.fromkeys(("first.3", "down.*.3", "up.*.3"), "row"),
}
LLAMA = named("q_proj k_proj v_proj gate_proj up_proj", "o_proj down_proj")
CASES = {
    "gpt": Case(lambda: build("gpt"), ("blocks",), OWN, 4, vocabulary=TIED),
    "two_tower": Case(lambda: build("two_tower"), (), OWN),
    "encoder_decoder": Case(lambda: build("encoder_decoder"), (), OWN),
    "experts": Case(lambda: build("experts"), (), named("query key value", "out")),
    "unet": Case(lambda: build("unet"), (), CHANNELS),
    "three_encoder": Case(lambda: build("three_encoder"), (), OWN),
    "llama": Case(
        lambda: llama(4), ("model.model.layers",), LLAMA, 4, vocabulary=TIED_LLAMA
    ),
    "tied_llama": Case(
        lambda: llama(4, tied=True),
        ("model.model.layers",),
        LLAMA,
        4,
        vocabulary=TIED_LLAMA,
    ),
    "grouped_llama": Case(lambda: llama(2), ("model.model.layers",), LLAMA, 4),
    "bert": Case(
        bert,
        ("model.bert.encoder",),
        BERT,
        5,  # and one in the pooler
    ),
    "masked_bert": Case(
        masked_bert,
        ("model.bert.encoder",),
        named("query key value intermediate.dense", "encoder.*.output.dense"),
        whole=True,  # of all labels: the first microbatch has none
        vocabulary={"*.word_embeddings": "row", "*.decoder": "column"},
    ),
    "t5": Case(
        t5,
        ("model.encoder.block", "model.decoder.block"),
        named("q k v wi", "o wo"),
        10,
        vocabulary={"*.embed_tokens": "row", "*.lm_head": "column"},
    ),
    "vit": Case(vit, ("model.vit.layers", "model.vit.encoder"), VIT, 4),
    "mixtral": Case(
        mixtral,
        ("model.model.layers",),
        named("q_proj k_proj v_proj", "o_proj") | {"*.mlp.experts": "expert"},
        even=True,
    ),
    "picked_modules": Case(lambda: mixture(modules), (), {}),
    "picked_stack": Case(lambda: mixture(selected), (), {}),
    "clip": Case(
        clip,
        ("model.text_model.encoder", "model.vision_model.encoder"),
        named("q_proj k_proj v_proj fc1", "out_proj fc2"),
        whole=True,
    ),
    "gpt with dropout": Case(dropped_gpt, ("blocks",), OWN, 2, drops=True),
    "llama with dropout": Case(
        lambda: llama(2, 1, 0.1), ("model.model.layers",), LLAMA, 2, drops=True
    ),
    "encoder with dropout": Case(dropped_encoder, ("layers",), {}, 2, drops=True),
    "bert with dropout": Case(
        lambda: bert(1, 0.1), ("model.bert.encoder",), BERT, 3, drops=True
    ),
    "eager bert with dropout": Case(
        lambda: bert(1, 0.1, "eager"), ("model.bert.encoder",), BERT, 3, drops=True
    ),
}


def made(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model and a batch, the same in every process."""
    torch.manual_seed(7)
    return CASES[name].make()


def placed_at_random(shards: int = 2) -> Schedule:
    """Two stages, each shard's weights and jobs on any worker."""
    draw = random.Random(shards)
    places: dict[Any, int] = {}

    def w(s: int, b: int, d: Direction, p: int) -> tuple[int, int]:
        keeper = places.setdefault((s, p), draw.randrange(4))
        return keeper, places.setdefault((s, b, d, p), draw.randrange(4))

    return Schedule(4, 4, stages=2, shards=shards, w=w, name="random")


SCHEDULES: dict[str, Callable[[int], Schedule]] = {
    "gpipe": lambda p: schedules.sharded(schedules.gpipe(1, 4), p),
    "1f1b": lambda p: schedules.sharded(schedules.one_f_one_b(2, 4), p),
    "zb_h1": lambda p: schedules.sharded(schedules.zb_h1(2, 4), p),
    "replicas": lambda p: schedules.replicate(
        schedules.sharded(schedules.gpipe(1, 2), p), 2
    ),
    "graph": lambda p: schedules.sharded(schedules.graph(2, 4), p),
    "random": placed_at_random,
}


def random_updaters(shards: int) -> Schedule:
    """Each shard's optimizer on any worker, two updates in a call."""
    schedule = placed_at_random(shards)
    return replace(schedule, update_every=2, u=lambda s, b, p: (3 * s + p) % 4)


# with the optimizer in the program
UPDATING: dict[str, Callable[[int], Schedule]] = SCHEDULES | {
    "1f1b in two updates": lambda p: schedules.sharded(
        replace(schedules.one_f_one_b(2, 4), update_every=2), p
    ),
    "fsdp": lambda p: schedules.sharded(schedules.fsdp(2, 4), p),
    "zero1": lambda p: schedules.sharded(schedules.zero1(2, 4), p),
    "copies of zero2": lambda p: schedules.replicate(
        schedules.sharded(schedules.gpipe(1, 2), p), 2, zero=2
    ),
    "random u": random_updaters,
}


def share(plan: Plan, model: nn.Module, layers: tuple[str, ...]) -> float:
    """The largest share of the layers' parameters that a worker keeps; of all, if no
    layers are named."""
    whole = {
        name: p.numel()
        for name, p in model.named_parameters()
        if not layers or name.startswith(layers)
    }
    numbers: Counter[int] = Counter()
    for group in plan.groups:
        for state in group.state:
            name, _, part = state.name.partition("[")
            if name in whole:
                parts = int(part.rstrip("]").split("/")[1]) if part else 1
                for worker in group.owners:
                    numbers[worker] += whole[name] // parts
    return max(numbers.values()) / sum(whole.values())


def sums(plan: Plan) -> tuple[int, int]:
    """How many values shard 1 gives for sums in F of a microbatch, and how many of its
    jobs do so in B, by the program of worker 1."""
    sends = plan.programs[1].graph.find_nodes(op="call_function", target=ops.send)
    tasks = [str(node.meta["task"]) for node in sends]
    forward = [task for task in tasks if task.startswith("0F0.1")]
    return len(forward), len({task for task in tasks if task.startswith("0B0.1")})
