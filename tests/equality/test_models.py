"""The plain models and their data: no plan and no worker, only eager PyTorch."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxsched.models import docstrings, pages, sources
from fxsched.models.docstrings import CODE_LENGTH, DOC_LENGTH, Parts
from fxsched.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from fxsched.models.experts import ExpertBlock, Experts, ExpertsConfig, MixtureOfExperts
from fxsched.models.gpt import GPT, GPTConfig
from fxsched.models.three_encoder import ThreeEncoder, ThreeEncoderConfig
from fxsched.models.two_tower import TwoTower, TwoTowerConfig
from fxsched.models.unet import UNet, UNetConfig

VOCABULARY = 4096
LENGTH = 32  # bytes
Batch = tuple[Tensor, ...]


@cache
def all_pages() -> Parts[pages.Pages]:
    return pages.load(VOCABULARY)


@cache
def all_sentences() -> Parts[sources.Sentences]:
    return sources.load_sentences(VOCABULARY)


@cache
def all_text() -> Parts[Tensor]:
    return sources.load_text()


@cache
def all_pairs() -> Parts[Batch]:
    d = docstrings.load(vocabulary=VOCABULARY)
    return Parts((d.train_code, d.train_doc), (d.held_out_code, d.held_out_doc))


@dataclass(frozen=True)
class Case:
    """A tiny model, its data, and how to draw its inputs from a part of them."""

    model: Callable[[], nn.Module]
    data: Callable[[], Parts[Any]]
    draw: Callable[[Any, int, torch.Generator], Batch]
    below: float  # where the held-out loss must get
    steps: int
    size: int = 32


def three_encoder() -> ThreeEncoder:
    return ThreeEncoder(
        ThreeEncoderConfig(
            vocabulary=VOCABULARY,
            width=32,
            image_layers=1,
            text_layers=1,
            audio_layers=1,
            trunk_layers=1,
        )
    )


def encoder_decoder() -> EncoderDecoder:
    return EncoderDecoder(EncoderDecoderConfig(VOCABULARY, VOCABULARY, 64, 32, 4, 1, 1))


def unet() -> UNet:
    return UNet(UNetConfig(channels=1, width=8))


def gpt() -> GPT:
    return GPT(GPTConfig(length=LENGTH, width=32, layers=1))


def experts() -> Experts:
    return Experts(ExpertsConfig(length=LENGTH, width=32, layers=1, experts=3))


def two_tower() -> TwoTower:
    return TwoTower(TwoTowerConfig(VOCABULARY, width=32, layers=1))


def draw_pairs(part: Batch, size: int, generator: torch.Generator) -> Batch:
    code, doc = part
    return docstrings.batch(code, doc, size, generator)


def draw_text(part: Tensor, size: int, generator: torch.Generator) -> Batch:
    return sources.windows(part, size, LENGTH, generator)


# Loss when only frequencies are known: 0.69 for two_tower and three_encoder, 4.65 for
# encoder_decoder, 0.028 (the variance of a pixel) for unet, 2.99 for gpt and experts.
CASES = {
    "two_tower": Case(two_tower, all_pairs, draw_pairs, 0.65, steps=80, size=64),
    "three_encoder": Case(three_encoder, all_pages, pages.batch, 0.66, steps=80),
    "encoder_decoder": Case(
        encoder_decoder, all_sentences, sources.batch, 4.6, steps=80
    ),
    "unet": Case(unet, all_pages, pages.noisy, 0.026, steps=30, size=16),
    "gpt": Case(gpt, all_text, draw_text, 2.9, steps=100),
    "experts": Case(experts, all_text, draw_text, 2.9, steps=100),
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def build(name: str) -> nn.Module:
    torch.manual_seed(1)
    return CASES[name].model()


def rows(part: Sequence[Tensor]) -> list[tuple[bytes, ...]]:
    """Row i of every tensor, as bytes."""
    return [tuple(x.numpy().tobytes() for x in row) for row in zip(*part, strict=True)]


def assert_shapes(part: Sequence[Tensor], *expected: tuple[int, ...]) -> None:
    found = [tuple(each.shape[1:]) for each in part]
    assert found == list(expected)
    assert len({len(each) for each in part}) == 1


def digest() -> str:
    """Of all that the data sets hold."""
    total = hashlib.sha256()
    for load in (all_pages, all_sentences, all_pairs, all_text):
        for part in load():
            for each in (part,) if isinstance(part, Tensor) else part:
                total.update(each.numpy().tobytes())
    return total.hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("part", Parts._fields)
def test_pages_are_pictures_words_and_sounds(part: str) -> None:
    found = getattr(all_pages(), part)
    assert_shapes(found, (1, 32, 64), (DOC_LENGTH,), (32, 33))
    assert [each.dtype for each in found] == [torch.float32, torch.int64, torch.float32]
    assert found.image.min() >= 0.0 and found.image.max() == 1.0
    assert found.text[:, :3].min() >= 1 and found.text.max() < VOCABULARY
    assert found.audio.min() == 0.0 and bool(found.audio.isfinite().all())


@pytest.mark.parametrize("part", Parts._fields)
def test_sentences_are_words_with_padding_at_the_end(part: str) -> None:
    found = getattr(all_sentences(), part)
    assert_shapes(found, (CODE_LENGTH,), (sources.SENTENCE,))
    for each in found:
        assert each.dtype == torch.int64
        assert each.min() >= 0 and each.max() < VOCABULARY
        assert not ((each[:, :-1] == 0) & (each[:, 1:] != 0)).any()


def test_text_is_source_without_blank_lines() -> None:
    for part in all_text():
        assert part.dtype == torch.uint8
        text = bytes(part.tolist()).decode()
        assert "\n\n" not in text
        assert text.count("def ") >= 530 and text.count("return ") > 500


def test_a_tenth_is_held_out_and_none_of_it_is_learnt_from() -> None:
    train, held_out = docstrings.library(CODE_LENGTH, DOC_LENGTH)
    assert 0.05 < len(held_out) / len(train) < 0.2
    for name in ("source", "code_words", "doc_words"):
        learnt, kept = ({str(getattr(f, name)) for f in p} for p in (train, held_out))
        assert len(learnt) == len(train) > 1000 and not learnt & kept, name
    assert not set(rows(all_pages().train)) & set(rows(all_pages().held_out))
    for data in (all_pages(), all_sentences(), all_pairs()):
        assert [len(part[0]) for part in data] == [len(train), len(held_out)]


@pytest.mark.slow
def test_another_process_with_other_hashes_reads_the_same() -> None:
    script = "from tests.equality.test_models import digest; print(digest())"
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"
    found = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == digest()


@pytest.mark.parametrize("name", CASES)
def test_a_generator_decides_the_batch(name: str) -> None:
    case = CASES[name]
    data = case.data().train
    draw, again = generator(3), generator(3)
    first, second = case.draw(data, 8, draw), case.draw(data, 8, draw)
    assert rows(first) == rows(case.draw(data, 8, again))
    assert rows(first) != rows(second)


def test_in_every_second_draw_one_of_three_is_anothers() -> None:
    few = pages.Pages(*(each[:60] for each in all_pages().train))
    *drawn, label = pages.batch(few, 64, generator())
    assert label.tolist() == [1.0, 0.0] * 32
    same = torch.stack(
        [
            (mine[:, None] == theirs).flatten(2).all(2)
            for mine, theirs in zip(drawn, few, strict=True)
        ]
    )  # [which of three, draw, function]
    own = same.sum(0).max(1)
    assert torch.equal(own.values, 2 + label.long())
    odd = ~same[:, torch.arange(64), own.indices]
    assert bool(odd.any(1).all())  # each of the three is another's in some draw


def test_a_picture_shows_kinds_of_characters() -> None:
    image = pages.pictures(["def f(x):\n    return 1"])[0, 0]
    assert image[0, :10].tolist() == pytest.approx(
        [0.4, 0.4, 0.4, 0, 0.4, 1, 0.4, 1, 1, 0]
    )
    assert image[1, :13].tolist() == pytest.approx([0] * 4 + [0.4] * 6 + [0, 0.6, 0])
    assert not image[2:].any()


def test_a_sound_is_loudest_at_its_own_pitch() -> None:
    two, four = pages.sounds(["\0~" * 2000, "\0\0\0~" * 64])  # bytes a period
    assert two[:, 1:].argmax(1).tolist() == [31] * 32
    assert four[:7, 2:31].argmax(1).tolist() == [14] * 7
    assert not four[8:].any()  # silence after the last byte


def test_noise_is_added_to_the_input_alone() -> None:
    noisy, clean = pages.noisy(all_pages().train, 64, generator(), noise=0.25)
    assert set(rows([clean])) <= set(rows([all_pages().train.image]))
    assert (noisy - clean).std().item() == pytest.approx(0.25, rel=0.02)


def test_the_target_comes_in_one_place_later() -> None:
    code, target_in, target_out = sources.batch(all_sentences().train, 64, generator())
    assert not target_in[:, 0].any()
    assert torch.equal(target_in[:, 1:], target_out[:, :-1])
    assert set(rows((code, target_out))) <= set(rows(all_sentences().train))


def test_the_target_of_a_byte_is_the_next_byte() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    tokens, targets = sources.windows(text, 500, 8, generator())
    assert tokens.shape == (500, 8) and tokens.dtype == torch.int64
    assert torch.equal(targets, tokens + 1)
    assert tokens.min() == 0 and targets.max() == 99


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_model_learns(name: str) -> None:
    case = CASES[name]
    model, data, draw = build(name), case.data(), generator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    unseen = case.draw(data.held_out, 64 if name == "unet" else 256, generator(1))

    def held_out_loss() -> float:
        with torch.no_grad():
            return float(model(*unseen))

    before = held_out_loss()
    for _ in range(case.steps):
        optimizer.zero_grad()
        model(*case.draw(data.train, case.size, draw)).backward()
        optimizer.step()
    assert held_out_loss() < case.below < before


@pytest.mark.parametrize("name", CASES)
def test_the_mean_over_microbatches_is_the_loss_of_the_batch(name: str) -> None:
    case, model = CASES[name], build(name)
    inputs = case.draw(case.data().train, 8, generator())
    whole = model(*inputs)
    parts = [model(*(x[b : b + 2] for x in inputs)) for b in range(0, 8, 2)]
    assert len({part.item() for part in parts}) == 4
    torch.testing.assert_close(torch.stack(parts).mean(), whole)
    weights = list(model.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(torch.stack(parts).mean(), weights),
        torch.autograd.grad(whole, weights),
        rtol=1e-4,
        atol=1e-6,
    )


def test_three_encoders_share_no_weights() -> None:
    model = three_encoder()
    encoders = (model.image, model.text, model.audio)
    inputs = pages.batch(all_pages().train, 4, generator())[:3]
    weights = [list(encoder.parameters()) for encoder in encoders]
    storages = [w.data_ptr() for each in weights for w in each]
    assert len(set(storages)) == len(storages)
    for i, encoder in enumerate(encoders):
        grads = torch.autograd.grad(
            encoder(inputs[i]).square().sum(),
            list(model.parameters()),
            allow_unused=True,
        )
        reached = sum(grad is not None for grad in grads)
        assert reached == len(weights[i])


def test_three_encoder_reads_no_padding_but_all_three_inputs() -> None:
    model = build("three_encoder")
    image, text, audio, label = pages.batch(all_pages().train, 8, generator())
    text[:, 12:] = 0
    logits = model(image, text, audio)
    assert logits.shape == label.shape
    torch.testing.assert_close(model(image, text[:, :12], audio), logits)
    for other in (
        (image.flip(0), text, audio),
        (image, text.flip(0), audio),
        (image, text, audio.flip(0)),
    ):
        assert not torch.allclose(model(*other), logits)


def test_three_encoder_with_a_label_gives_the_cross_entropy_of_its_logits() -> None:
    model = build("three_encoder")
    *inputs, label = pages.batch(all_pages().train, 8, generator())
    p = model(*inputs).sigmoid()
    wanted = -(label * p.log() + (1 - label) * (1 - p).log()).mean()
    torch.testing.assert_close(model(*inputs, label), wanted)


def test_experts_are_mixed_by_the_router() -> None:
    torch.manual_seed(0)
    mixture, x = MixtureOfExperts(width=8, experts=3), torch.randn(2, 5, 8)
    share = mixture.router(x).softmax(-1)
    wanted = sum(share[..., i : i + 1] * e(x) for i, e in enumerate(mixture.experts))
    torch.testing.assert_close(mixture(x), wanted)
    mixture(x[:1, :1]).sum().backward()  # one token reaches all of them
    for name, weight in mixture.named_parameters():
        assert weight.grad is not None and weight.grad.any(), name


def test_an_expert_block_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    block, x = ExpertBlock(width=8, heads=2, experts=3), torch.randn(1, 6, 8)
    changed = x.clone()
    changed[:, 3] = torch.randn(8)
    same = (block(changed) == block(x)).all(-1)[0]
    assert same.tolist() == [True] * 3 + [False] * 3
