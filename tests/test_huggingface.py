"""Models that nobody here wrote, from small random configurations, offline."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, schedules

Inputs = dict[str, Tensor]


def bert() -> tuple[nn.Module, Inputs]:
    config = transformers.BertConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=37,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    mask = torch.ones(8, 12, dtype=torch.int64)
    mask[::2, 9:] = 0
    return transformers.BertForSequenceClassification(config), {
        "input_ids": torch.randint(1, 99, (8, 12)),
        "attention_mask": mask,
        "labels": torch.randint(0, 3, (8,)),
    }


def t5() -> tuple[nn.Module, Inputs]:
    config = transformers.T5Config(
        vocab_size=99,
        d_model=32,
        d_kv=8,
        d_ff=37,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config), {
        "input_ids": torch.randint(1, 99, (8, 12)),
        "labels": torch.randint(1, 99, (8, 9)),
    }


def gpt2() -> tuple[nn.Module, Inputs]:
    config = transformers.GPT2Config(
        vocab_size=99, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    )
    tokens = torch.randint(1, 99, (8, 12))
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("schedule", ["one_f_one_b", "fslpp"])
@pytest.mark.parametrize("make", [bert, t5])
def test_equal_to_eager(make, schedule: str) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    reference = copy.deepcopy(model)
    total = torch.zeros(())
    for b in range(4):
        part = {name: value[2 * b : 2 * b + 2] for name, value in inputs.items()}
        loss = reference(**part).loss / 4
        loss.backward()
        total = total + loss.detach()
    way = {
        "one_f_one_b": schedules.one_f_one_b(4, 4),
        "fslpp": schedules.fslpp(4, 2, 4),
    }[schedule]
    backend = fxsched.backend(way)
    output = torch.compile(model, backend=backend)(**inputs)
    output.loss.backward()
    assert type(output).__name__.endswith("Output")
    assert len(output.logits) == 8
    assert len(backend.plan.stages) == 4
    torch.testing.assert_close(output.loss.detach(), total)
    wanted = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, wanted[name].grad, rtol=1e-4, atol=1e-6, msg=name
        )


def test_a_graph_break_inside_a_model_shows_its_line() -> None:
    model, inputs = gpt2()
    run = torch.compile(model, backend=fxsched.backend(schedules.gpipe(2, 4)))
    with pytest.raises(PlanError, match=r"breaks at\n.*modeling_gpt2.py"):
        run(**inputs)
