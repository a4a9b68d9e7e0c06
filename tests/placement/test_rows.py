"""Which operations keep rows of a batch apart, and what is warned of."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, Schedule
from fxsched.placement.kinds import Effect, Kind, Rows
from fxsched.placement.row_warnings import RowWatch
from fxsched.profiling import MicrobatchTraced, Tracer
from tests import cases

SEQUENCES, FEATURES = torch.randn(8, 4, 6), torch.randn(8, 6)
CLASSES = torch.randint(0, 6, (8,), generator=torch.Generator().manual_seed(1))
KEEP = (torch.arange(32).view(8, 4) % 3 > 0).float()


class Model(nn.Module):
    def __init__(self, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.attention = nn.MultiheadAttention(6, 2)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.compute(self, *inputs)


def rows_of(model: nn.Module, *inputs: Tensor) -> list[Rows | None]:
    """Of each output of a model all of whose nodes are cut into two microbatches."""
    backend = fxsched.backend(Schedule(1, 2), loss_reduction="mean")
    tracer = Tracer(backend.options)
    with pytest.raises(MicrobatchTraced) as end:
        torch.compile(model, backend=tracer)(*inputs)
    return list(end.value.traced.rows)


def pairs(s: Model, x: Tensor, y: Tensor) -> Tensor:
    similar = s.linear(x) @ s.linear(y).t()
    return F.cross_entropy(similar, torch.arange(len(x), device=x.device))


def shifted(s: Model, x: Tensor, y: Tensor) -> Tensor:
    new = torch.zeros_like(y)
    new[1:] = y[:-1]
    return (s.linear(x) - new).pow(2).mean()


def time_first(s: Model, x: Tensor) -> Tensor:
    """[batch, time, 6] through time-first layers and back."""
    return s.attention(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1).pow(2).mean()


KINDS: dict[str, tuple[Kind, Callable[..., Any], tuple[Tensor, ...]]] = {
    "sum": (Kind.SUM, lambda s, x: s.linear(x).sum(), (SEQUENCES,)),
    "mean": (Kind.MEAN, lambda s, x: s.linear(x).pow(2).mean(), (SEQUENCES,)),
    "sum / batch": (Kind.MEAN, lambda s, x: s.linear(x).sum() / len(x), (FEATURES,)),
    "sum * (1 / batch)": (
        Kind.MEAN,
        lambda s, x: s.linear(x).sum() * (1 / x.shape[0]),
        (FEATURES,),
    ),
    "sum / tensor(batch)": (
        Kind.MEAN,
        lambda s, x: s.linear(x).sum() / torch.tensor(x.shape[0]),
        (FEATURES,),
    ),
    "batchmean": (
        Kind.MEAN,
        lambda s, x: F.kl_div(
            s.linear(x).log_softmax(-1), x.softmax(-1), reduction="batchmean"
        ),
        (FEATURES,),
    ),
    "soft labels": (
        Kind.MEAN,
        lambda s, x: F.cross_entropy(s.linear(x), x.softmax(-1)),
        (FEATURES,),
    ),
    "labels": (
        Kind.MEAN,
        lambda s, x, y: F.cross_entropy(s.linear(x), y, label_smoothing=0.1),
        (FEATURES, CLASSES),
    ),
    "labels, summed": (
        Kind.SUM,
        lambda s, x, y: F.cross_entropy(s.linear(x), y, reduction="sum"),
        (FEATURES, CLASSES),
    ),
    "mean and weight decay": (
        Kind.MEAN,
        lambda s, x: s.linear(x).pow(2).mean() + s.linear.weight.pow(2).sum(),
        (FEATURES,),
    ),
    "mean of each row's": (
        Kind.MEAN,
        lambda s, x, keep: ((s.linear(x).mean(-1) * keep).sum(1) / keep.sum(1)).mean(),
        (SEQUENCES, KEEP),
    ),
    "spectrum": (
        Kind.MEAN,
        lambda s, x: (
            torch.stft(s.linear(x), 4, window=torch.ones(4), return_complex=True)
            .abs()
            .mean()
        ),
        (FEATURES,),
    ),
    "gram": (Kind.SUM, lambda s, x: (s.linear(x).t() @ x).sum(), (FEATURES,)),
    "one of each row": (
        Kind.MEAN,
        lambda s, x, y: s.linear(x)[torch.arange(len(x)), y].mean(),
        (FEATURES, CLASSES),
    ),
    "halves of a doubled batch": (
        Kind.MEAN,
        lambda s, x: s.linear(torch.cat([x, -x])).chunk(2)[0].pow(2).mean(),
        (FEATURES,),
    ),
    "softmax of features": (
        Kind.MEAN,
        lambda s, x: s.linear(x).softmax(-1).pow(2).mean(),
        (FEATURES,),
    ),
    "in another input's shape": (
        Kind.MEAN,
        lambda s, x, y: (
            s.linear(x.flatten(0, 1)).view(y.shape[0], -1, 6) + s.linear(y)[:, None]
        ).mean(),
        (SEQUENCES, FEATURES),
    ),
    "time first": (Kind.MEAN, time_first, (SEQUENCES,)),
    "renormalised rows": (
        Kind.MEAN,
        lambda s, x: s.linear(x).renorm(2, 0, 0.5).pow(2).mean(),
        (FEATURES,),
    ),
    "rolled features": (
        Kind.MEAN,
        lambda s, x: (s.linear(x) * x.roll(1, -1)).mean(),
        (FEATURES,),
    ),
    "instance norm": (
        Kind.MEAN,
        lambda s, x: F.instance_norm(s.linear(x)).pow(2).mean(),
        (SEQUENCES,),
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_rows_apart_end_in_a_sum_or_a_mean(name: str) -> None:
    if name == "soft labels" and torch.__version__ < (2, 13):
        pytest.skip("its shapes fix the batch size, which is refused")
    kind, compute, inputs = KINDS[name]
    assert rows_of(Model(compute), *inputs) == [Rows(kind)]


def doubled_otherwise(s: Model, x: Tensor) -> Tensor:
    """A batch after itself, beside one in which each row comes twice."""
    h = s.linear(x)
    both = torch.cat([torch.cat([h, -h]), h.repeat_interleave(2, 0)], 1)
    return (both[:, :6] * both[:, 6:]).mean()


SIZED = {
    "added": lambda weight, size: weight + size,
    "divided": lambda weight, size: weight / size,
    "above": lambda weight, size: torch.tensor(size).clamp(min=3),
}


@pytest.mark.parametrize("name", SIZED)
def test_a_sum_over_another_number_than_the_batchs_size_is_no_mean(name: str) -> None:
    def compute(s: Model, x: Tensor) -> Tensor:
        number = SIZED[name](s.linear.weight.pow(2).sum(), len(x))
        return s.linear(x).pow(2).sum() / number

    (rows,) = rows_of(Model(compute), FEATURES)
    assert rows is not None and rows.kind in (Kind.OTHER, Kind.UNKNOWN)


MIXED: dict[str, tuple[Effect, Callable[..., Any], tuple[Tensor, ...]]] = {
    "contrastive": (Effect.PAIRS, pairs, (FEATURES, FEATURES + 1)),
    "batch norm": (
        Effect.STATISTICS,
        lambda s, x: s.norm(s.linear(x)).pow(2).mean(),
        (FEATURES,),
    ),
    "centred": (
        Effect.STATISTICS,
        lambda s, x: (s.linear(x) - s.linear(x).mean(0)).pow(2).mean(),
        (FEATURES,),
    ),
    "attention over the batch": (
        Effect.PAIRS,
        lambda s, x: s.attention(x, x, x)[0].pow(2).mean(),
        (SEQUENCES,),
    ),
    "frames of two rows": (
        Effect.UNSURE,
        lambda s, x: s.linear(x).as_strided((len(x), 7), (5, 1)).pow(2).mean(),
        (FEATURES,),
    ),
    "softmax over the batch": (
        Effect.ORDER,
        lambda s, x: s.linear(x).softmax(0).pow(2).mean(),
        (FEATURES,),
    ),
    "neighbours": (Effect.ORDER, shifted, (FEATURES, FEATURES)),
    "renormalised over the batch": (
        Effect.ORDER,
        lambda s, x: s.linear(x).renorm(2, 1, 0.5).pow(2).mean(),
        (FEATURES,),
    ),
    "embedding by frequency": (
        Effect.STATISTICS,
        lambda s, x, y: F.embedding(y, s.linear.weight, None, 2.0, 2.0, True).mean(),
        (FEATURES, CLASSES),
    ),
    "doubled in two orders": (Effect.PAIRS, doubled_otherwise, (FEATURES,)),
    "flipped": (
        Effect.ORDER,
        lambda s, x: (s.linear(x) * x.flip(0)).mean(),
        (FEATURES,),
    ),
    "rolled through all elements": (
        Effect.ORDER,
        lambda s, x: (s.linear(x) * x.roll(1)).mean(),
        (FEATURES,),
    ),
    "maximum": (Effect.REDUCTION, lambda s, x: s.linear(x).amax(0).sum(), (FEATURES,)),
    "root": (
        Effect.FUNCTION,
        lambda s, x: s.linear(x).pow(2).mean().sqrt(),
        (FEATURES,),
    ),
    "masked": (
        Effect.RATIO,
        lambda s, x, keep: (s.linear(x).mean(-1) * keep).sum() / keep.sum(),
        (SEQUENCES, KEEP),
    ),
    "class weights": (
        Effect.RATIO,
        lambda s, x, y: F.cross_entropy(s.linear(x), y, weight=x[0].detach().exp()),
        (FEATURES, CLASSES),
    ),
    "sum and weight decay": (
        Effect.CONSTANT,
        lambda s, x: s.linear(x).pow(2).sum() + s.linear.weight.pow(2).sum(),
        (FEATURES,),
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_meet_have_a_cause(name: str) -> None:
    effect, compute, inputs = MIXED[name]
    (rows,) = rows_of(Model(compute), *inputs)
    assert rows is not None and rows.cause is not None
    assert rows.cause.effect is effect
    assert __file__ in str(rows.cause.stack)


def test_spectra_are_of_rows_and_the_mean_of_those_that_have_labels() -> None:
    class Spoken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("window", torch.hann_window(16))
            self.layers = nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 5))

        def forward(self, sound: Tensor, labels: Tensor) -> Tensor:
            waves = torch.stft(sound, 16, 8, window=self.window, return_complex=True)
            return F.cross_entropy(self.layers(waves.abs().mT).mean(1), labels)

    labels = torch.randint(0, 5, (8,)).index_fill(0, torch.arange(3), -100)
    batch, schedule = (torch.randn(8, 64), labels), fxsched.schedules.gpipe(2, 4)
    assert fxsched.plan(Spoken(), schedule, *batch).schedule.stages == 2
    assert fxsched.verify(Spoken(), schedule, *batch).passed


@pytest.mark.slow
def test_clip_meets_at_its_logits() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config=sizes | {"vocab_size": 20, "eos_token_id": 2},
        vision_config=sizes | {"image_size": 8, "patch_size": 4},
        projection_dim=8,
    )

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.clip = transformers.CLIPModel(config)

        def forward(self, words: Tensor, images: Tensor) -> Any:
            return self.clip(words, images, return_loss=True).loss

    (rows,) = rows_of(Loss(), torch.full((4, 5), 2), torch.randn(4, 3, 8, 8))
    assert rows is not None and rows.cause is not None
    assert rows.cause.effect is Effect.PAIRS
    assert "logits_per_text = torch.matmul" in str(rows.cause.stack)


def warned(
    model: nn.Module, *batches: tuple[Tensor, ...], reduction: str = "mean"
) -> list[str]:
    """What is said of rows in steps on these batches."""
    schedule = fxsched.schedules.gpipe(1, 4)
    backend = fxsched.backend(schedule, loss_reduction=reduction)
    step = torch.compile(model, backend=backend)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", fxsched.RowsWarning)
        for inputs in batches:
            step(*inputs)
    return [str(w.message) for w in found if w.category is fxsched.RowsWarning]


@pytest.mark.parametrize("name", cases.MODELS | cases.BRANCHING)
def test_losses_of_the_models_are_means(name: str) -> None:
    model, inputs = cases.build(name)
    assert rows_of(model, *inputs) == [Rows(Kind.MEAN)]


def test_a_sum_is_named_once() -> None:
    model = Model(lambda s, x: s.linear(x).sum())
    (text,) = warned(model, (FEATURES,), (FEATURES,), (FEATURES[:4],))
    assert 'loss is a sum over the batch, but loss_reduction="mean"' in text
    assert 'write fxsched.backend(schedule, loss_reduction="sum")' in text
    assert warned(model, (FEATURES,), reduction="sum") == []


def test_a_mean_is_named_where_a_sum_was_asked_for() -> None:
    model = Model(lambda s, x: s.linear(x).mean())
    (text,) = warned(model, (FEATURES,), reduction="sum")
    assert "4 times eager's" in text


def test_contrastive_losses_are_named_with_their_line() -> None:
    (text,) = warned(Model(pairs), (FEATURES, FEATURES + 1))
    assert "every row of the batch meets every other (aten.mm.default)" in text
    assert f"{__file__}:" in text and "in pairs: similar = s.linear(x) @" in text


class KeepsAverage(Model):
    """State that the batch goes into, which changes nothing else of the model."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        super().__init__(compute)
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.average.copy_(0.9 * self.average + 0.1 * x.mean())
        return super().forward(x)


@pytest.mark.slow
def test_what_no_rule_knows_is_named_where_all_rows_were_asked_for() -> None:
    def compute(s: Any, x: Tensor) -> Tensor:
        return F.pdist(s.linear(x)).mean()

    keeps = KeepsAverage(compute)
    whole = copy.deepcopy(keeps)
    step = torch.compile(keeps, backend=fxsched.backend(Schedule(1, 4)))
    torch.testing.assert_close(step(FEATURES), whole(FEATURES))
    torch.testing.assert_close(keeps.state_dict(), whole.state_dict())
    assert warned(KeepsAverage(compute), (FEATURES,), reduction="exact") == []
    assert warned(Model(compute), (FEATURES,), reduction="mean") == []
    assert warned(Model(compute), (FEATURES,), reduction="exact") == []
    text = fxsched.explain(Model(compute), fxsched.schedules.gpipe(1, 4), FEATURES)
    assert "rows of the batch may meet in pdist, at " in text
    assert "placements" not in text, "which only take operators of the user"


def test_each_place_where_rows_meet_is_named() -> None:
    def compute(s: Model, x: Tensor) -> Tensor:
        for _ in range(2):
            x = s.linear(x)
            x = x - x.mean(0)
        x = s.linear(x).softmax(0)
        x = x * s.linear(x).cumsum(0)
        x = x + s.linear(x).amax(0)
        return s.linear(x).flip(0).mean() + s.linear(x).var()

    text = fxsched.plan(Model(compute), fxsched.schedules.gpipe(1, 4), FEATURES)
    said = " ".join(text.explain().split())
    names = ("sub", "_softmax", "cumsum", "amax")
    assert said.count("rows of the batch meet in aten.") == len(names)
    for name in names:
        assert f"rows of the batch meet in aten.{name}." in said
    assert "and in 2 more places " in said


def test_batch_statistics_are_named_in_training_only() -> None:
    model = Model(lambda s, x: s.norm(s.linear(x)))
    (text,) = warned(model, (FEATURES,))
    assert "output 0 of 4 microbatches is not eager's" in text
    assert "statistics of the whole batch" in text
    assert warned(model.eval(), (FEATURES,)) == []


def test_ignored_labels_are_named_when_microbatches_have_unequal_numbers() -> None:
    model = Model(lambda s, x, y: F.cross_entropy(s.linear(x), y))
    unequal, equal = CLASSES.clone(), CLASSES.clone()
    unequal[:3], equal[::2] = -100, -100
    same = warned(model, (FEATURES, CLASSES), (FEATURES, equal))
    assert same == []  # of all labels, or of one in each microbatch
    batches = (FEATURES, CLASSES), (FEATURES, unequal), (FEATURES, unequal)
    (text,) = warned(model, *batches)
    assert "labels that are not -100, of which microbatches have from 0 to 2" in text
    assert "F.cross_entropy(s.linear(x), y)" in text


def test_numbers_of_labels_on_a_device_are_read_a_call_later() -> None:
    """Reading one of the meta device raises, as it has none."""
    watch: Any = object.__new__(RowWatch)
    watch.texts, watch.pending, watch.microbatches = [], [], 2
    watch.labels = [SimpleNamespace(counts=lambda value, _: value)]
    watch.early = lambda *args: [torch.ones(2, device="meta")]
    watch((), set())
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        watch((), set())


@torch.library.custom_op("rows::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


doubled.register_autograd(lambda ctx, gradient: gradient * 2)


def test_an_operation_of_the_users_own_keeps_rows_where_they_say_so() -> None:
    model = Model(lambda s, x: doubled(s.linear(x)).mean())
    (rows,) = rows_of(model, FEATURES)
    assert rows is not None and rows.cause is not None
    fxsched.keeps_rows("rows::doubled")
    assert rows_of(model, FEATURES) == [Rows(Kind.MEAN)]
    crossed = Model(lambda s, x: doubled(s.linear(x) - x.mean(0)).mean())
    (rows,) = rows_of(crossed, FEATURES)
    assert rows is not None and rows.cause is not None


@pytest.mark.parametrize("name", ["doubled", "rows::tripled", "nowhere::x", print, ""])
def test_what_is_no_operation_keeps_no_rows(name: Any) -> None:
    with pytest.raises(PlanError, match="give the name of an operation"):
        fxsched.keeps_rows(name)


def test_pytorchs_own_operations_are_not_described() -> None:
    with pytest.raises(PlanError, match="only those of your own"):
        fxsched.keeps_rows("aten::mm")
