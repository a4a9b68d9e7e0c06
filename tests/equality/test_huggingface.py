"""Models that nobody here wrote, from small random configurations, offline.

pytest prints what the automatic split made of each of them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import fxsched
from fxsched import Plan, PlanError, schedules
from fxsched.ir import ops

from ..cases import assert_equal, train

BATCH, MICROBATCHES = 16, 8
TOKENS, ANSWERS = 99, 5
Inputs = dict[str, Tensor]
Make = Callable[[], tuple[nn.Module, Inputs]]

# What many configurations share. No dropout: eager draws other numbers.
WIDTHS: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 37,
}
BERT_LIKE: dict[str, Any] = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    **WIDTHS,
}
BART_LIKE: dict[str, Any] = {
    "vocab_size": TOKENS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 37,
    "decoder_ffn_dim": 37,
    "dropout": 0.0,
}


def tokens(length: int) -> Tensor:
    return torch.randint(3, TOKENS, (BATCH, length))


def answers() -> Tensor:
    return torch.randint(0, ANSWERS, (BATCH,))


def bert() -> tuple[nn.Module, Inputs]:
    config = transformers.BertConfig(
        vocab_size=TOKENS, num_hidden_layers=3, num_labels=ANSWERS, **BERT_LIKE
    )
    mask = torch.ones(BATCH, 12, dtype=torch.int64)
    mask[::2, 9:] = 0
    return transformers.BertForSequenceClassification(config), {
        "input_ids": tokens(12),
        "attention_mask": mask,
        "labels": answers(),
    }


def t5() -> tuple[nn.Module, Inputs]:
    config = transformers.T5Config(
        vocab_size=TOKENS,
        d_model=32,
        d_kv=8,
        d_ff=37,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        use_cache=False,  # copies the configuration: Dynamo's 2.11 and 2.12 break there
        decoder_start_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config)
    return model, {"input_ids": tokens(12), "labels": tokens(9)}


class Clip(nn.Module):
    """CLIP's two towers, and a head that tells whether text and image belong together.

    CLIP's own loss compares every sample with every other, so it has no microbatches.
    """

    def __init__(self) -> None:
        super().__init__()
        text = transformers.CLIPTextConfig(
            vocab_size=TOKENS,
            num_hidden_layers=2,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            **WIDTHS,
        )
        vision = transformers.CLIPVisionConfig(
            num_hidden_layers=2, image_size=16, patch_size=4, **WIDTHS
        )
        self.text = transformers.CLIPTextModel(text)
        self.vision = transformers.CLIPVisionModel(vision)
        self.head = nn.Linear(64, 1)

    def forward(
        self, input_ids: Tensor, pixel_values: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        text = self.text(input_ids=input_ids).pooler_output
        image = self.vision(pixel_values=pixel_values).pooler_output
        score = self.head(torch.cat([text, image], 1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(score, labels)
        return loss, score


def clip() -> tuple[nn.Module, Inputs]:
    return Clip(), {
        "input_ids": tokens(12),
        "pixel_values": torch.randn(BATCH, 3, 16, 16),
        "labels": torch.arange(BATCH) % 2.0,
    }


def lxmert() -> tuple[nn.Module, Inputs]:
    config = transformers.LxmertConfig(
        vocab_size=TOKENS,
        num_qa_labels=ANSWERS,
        l_layers=2,
        r_layers=2,
        x_layers=2,
        visual_feat_dim=16,
        **BERT_LIKE,
    )
    return transformers.LxmertForQuestionAnswering(config), {
        "input_ids": tokens(12),
        "visual_feats": torch.randn(BATCH, 6, 16),
        "visual_pos": torch.rand(BATCH, 6, 4),
        "labels": answers(),
    }


def vit() -> tuple[nn.Module, Inputs]:
    config = transformers.ViTConfig(
        num_hidden_layers=3,
        image_size=16,
        patch_size=4,
        num_labels=ANSWERS,
        **BERT_LIKE,
    )
    images = torch.randn(BATCH, 3, 16, 16)
    model = transformers.ViTForImageClassification(config)
    return model, {"pixel_values": images, "labels": answers()}


def bart() -> tuple[nn.Module, Inputs]:
    config = transformers.BartConfig(max_position_embeddings=64, **BART_LIKE)
    model = transformers.BartForConditionalGeneration(config)
    return model, {"input_ids": tokens(12), "labels": tokens(9)}


def whisper() -> tuple[nn.Module, Inputs]:
    config = transformers.WhisperConfig(
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=20,
        pad_token_id=0,
        decoder_start_token_id=1,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,  # as above
        **BART_LIKE,
    )
    sound = torch.randn(BATCH, 8, 40)
    model = transformers.WhisperForConditionalGeneration(config)
    return model, {"input_features": sound, "labels": tokens(9)}


def llama() -> tuple[nn.Module, Inputs]:
    config = transformers.LlamaConfig(
        vocab_size=TOKENS, num_hidden_layers=2, num_key_value_heads=2, **WIDTHS
    )
    text = tokens(12)
    return transformers.LlamaForCausalLM(config), {"input_ids": text, "labels": text}


def resnet() -> tuple[nn.Module, Inputs]:
    config = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[16, 32],
        depths=[2, 2],
        layer_type="basic",
        num_labels=ANSWERS,
    )
    images = torch.randn(BATCH, 3, 32, 32)
    model = transformers.ResNetForImageClassification(config)
    return model, {"pixel_values": images, "labels": answers()}


def gpt2() -> tuple[nn.Module, Inputs]:
    """Dynamo breaks where it logs that it has no loss_type; see whole_gpt2."""
    config = transformers.GPT2Config(
        vocab_size=TOKENS,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    text = tokens(12)
    return transformers.GPT2LMHeadModel(config), {"input_ids": text, "labels": text}


def whole_gpt2() -> tuple[nn.Module, Inputs]:
    model, inputs = gpt2()
    model.loss_type = "ForCausalLM"  # as it does itself once it has logged
    return model, inputs


def eager_step(model: nn.Module, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """One step of plain PyTorch over the same microbatches: the mean loss, scores."""
    losses, scores = [], []
    for b in range(MICROBATCHES):
        part = {name: ops.rows(x, b, MICROBATCHES) for name, x in inputs.items()}
        loss, score = model(**part)[:2]
        (loss / MICROBATCHES).backward()
        losses.append(loss.detach())
        scores.append(score.detach())
    return torch.stack(losses).mean(), torch.cat(scores)


def assert_trains_as_eager(make: Make, schedule: fxsched.Schedule) -> Plan:
    """Trains two steps; losses, scores, gradients, parameters and buffers are equal to
    those of eager PyTorch by microbatches, as BatchNorm is here."""
    torch.manual_seed(0)
    model, inputs = make()
    model.train()
    reference = copy.deepcopy(model)
    backend = fxsched.backend(schedule, transport="threads", batch_norm="microbatch")
    compiled = torch.compile(model, backend=backend)
    found, wanted = [], []

    def step() -> Tensor:
        loss, scores = compiled(**inputs)[:2]
        loss.backward()
        found.append(scores.detach())
        return loss

    def step_of_eager() -> Tensor:
        loss, scores = eager_step(reference, inputs)
        wanted.append(scores)
        return loss

    result = train(model, step, "sgd", steps=2)
    assert_equal(result, train(reference, step_of_eager, "sgd", steps=2))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert backend.plan is not None
    return backend.plan


def bottleneck(plan: Plan) -> float:
    """F and B of the slowest stage, over the mean of all stages."""
    seconds = [d["forward"] + d["backward"] for _, d in plan.stages.nodes(data=True)]
    return max(seconds) * len(seconds) / sum(seconds)


@pytest.fixture
def report(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Callable[[Plan], None]:
    """report(plan): adds a row to the table that conftest.py prints in the end."""

    def add(plan: Plan) -> None:
        name = request.node.callspec.params["make"].__name__.removeprefix("whole_")
        size = sum(data["bytes"] for *_, data in plan.stages.edges(data=True))
        stages, edges = plan.stages.number_of_nodes(), plan.stages.number_of_edges()
        row = (name, plan.schedule.name, stages, bottleneck(plan), edges, size)
        record_property("partition", row)

    return add


MODELS = [bert, t5, clip, lxmert, vit, bart, whisper, llama, resnet, whole_gpt2]


@pytest.mark.slow
@pytest.mark.parametrize("make", MODELS)
def test_equal_to_eager(make: Make, report: Callable[[Plan], None]) -> None:
    plan = assert_trains_as_eager(make, schedules.one_f_one_b(4, MICROBATCHES))
    report(plan)
    assert len(plan.stages) == 4
    assert bottleneck(plan) < 1.5
    assert_nothing_is_passed_on(plan)
    if make is clip:
        assert_towers_apart(plan)


@pytest.mark.slow
@pytest.mark.parametrize("make", [clip, lxmert])
def test_equal_to_eager_with_branches_side_by_side(
    make: Make, report: Callable[[Plan], None]
) -> None:
    plan = assert_trains_as_eager(make, schedules.graph(4, MICROBATCHES))
    report(plan)
    if make is clip:
        assert_towers_apart(plan)


@pytest.mark.slow
def test_equal_to_eager_where_a_tied_weight_is_kept_elsewhere() -> None:
    assert_trains_as_eager(bart, schedules.fslpp(4, 2, MICROBATCHES))


def assert_nothing_is_passed_on(plan: Plan) -> None:
    """Whoever gets a value computes with it, where each worker has one stage."""
    for program in plan.programs:
        for node in program.graph.find_nodes(op="call_function", target=ops.recv):
            assert {user.target for user in node.users} - {ops.send, ops.free}, node


def assert_towers_apart(plan: Plan) -> None:
    """No stage has work of both encoders, and only the head's reads from both."""
    modules = {s: data["modules"] for s, data in plan.stages.nodes(data=True)}
    work = re.compile(r"(text|vision)\..*(embeddings|encoder)")
    towers = {
        s: {found[1] for name in names if (found := work.match(name))}
        for s, names in modules.items()
    }
    assert set.union(*towers.values()) == {"text", "vision"}
    assert all(len(found) <= 1 for found in towers.values()), modules
    for maker, reader in plan.stages.edges:
        if "head" not in modules[reader]:
            assert len(towers[maker] | towers[reader]) <= 1, (maker, reader)


@pytest.mark.slow
def test_a_graph_break_inside_a_model_shows_its_line() -> None:
    model, inputs = gpt2()
    backend = fxsched.backend(schedules.gpipe(2, 4))
    run = torch.compile(lambda **named: model(**named), backend=backend)
    with pytest.raises(PlanError, match=r"breaks at\n.*modeling_utils.py"):
        run(**inputs)
