"""Calls of other lengths share plans: filled up, equal to eager, or an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fxsched
from fxsched import PlanError, schedules
from fxsched.capture.lengths import bucket
from fxsched.runtime.length_check import LengthsWarning
from tests.started_ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("error::fxsched.LengthsWarning")

GPIPE = schedules.gpipe(2, 2)
LABELLED: Any = {"tokens": (1, 0), "labels": (1, -100)}
TOKENS: Any = {"tokens": (1, 0), "mask": (1, 0), "labels": (1, -100)}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Language(nn.Module):
    """Tokens [batch, length] to logits, and the mean cross entropy of labels that are
    not -100. Causal, or, with a mask, of all positions that are in it."""

    def __init__(self, most: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.places = nn.Parameter(torch.randn(most, 16))
        self.norm, self.qkv = nn.LayerNorm(16), nn.Linear(16, 48)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(16, 32)

    def hidden(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        x = self.embed(tokens) + self.places[: tokens.shape[1]]
        q, k, v = self.qkv(self.norm(x))[:, None].chunk(3, -1)
        causal = mask is None
        seen = None if mask is None else mask[:, None, None, :].bool()
        mixed = F.scaled_dot_product_attention(q, k, v, seen, is_causal=causal)
        return self.dropout(x + mixed[:, 0])

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, mask: Tensor | None = None
    ) -> Any:
        logits = self.head(self.hidden(tokens, mask))
        if labels is None:
            return logits
        return F.cross_entropy(logits.transpose(1, 2), labels), logits


def batch(length: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    """Tokens, and labels of which some are ignored."""
    tokens = torch.randint(1, 32, (rows, length))
    return tokens, tokens.where(torch.rand(rows, length) > 0.2, -100)


def mask_of(tokens: Tensor) -> Tensor:
    """The last positions of the last rows are none."""
    mask = torch.ones_like(tokens)
    mask[-2:, -3:] = 0
    return mask


def assert_like_eager(run: Any, model: nn.Module, *inputs: Any) -> None:
    """Loss, outputs and gradients of a step are those of a copy of the model."""
    reference = copy.deepcopy(model)
    results = []
    for each, call in ((model, run), (reference, reference)):
        each.zero_grad()
        out = call(*inputs)
        (out[0] if isinstance(out, tuple) else out.square().mean()).backward()
        results.append([out, [p.grad for p in each.parameters()]])
    torch.testing.assert_close(*results)


def compiled(model: nn.Module, lengths: Any = TOKENS, **options: Any) -> Any:
    """The model by a schedule of two workers, and its backend."""
    schedule = options.pop("schedule", GPIPE)
    backend = fxsched.backend(schedule, lengths=lengths, **options)
    return torch.compile(model, backend=backend), backend


def test_lengths_are_filled_up_by_less_than_a_quarter() -> None:
    assert [bucket(n) for n in (1, 2, 8, 9, 31, 33, 40, 64, 65)] == [
        *(1, 2, 8, 10, 32, 40, 40, 64, 80),
    ]
    lengths = range(1, 5000)
    assert all(n <= bucket(n) == bucket(bucket(n)) < 1.25 * n for n in lengths)
    assert len({bucket(n) for n in range(33, 513)}) == 16


@pytest.mark.slow
def test_thirty_lengths_are_four_plans_of_one_graph() -> None:
    counters.clear()
    model = Language()
    run, backend = compiled(model)
    for length in range(33, 63):
        assert_like_eager(run, model, *batch(length))
    assert len(backend._steps) == 4
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_hugging_face_names_are_known() -> None:
    from transformers import BertConfig, BertForMaskedLM

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    model = BertForMaskedLM(BertConfig(**sizes, max_position_embeddings=62)).eval()
    run, backend = compiled(model, "bucket")
    for length in (33, 39, 59, 61):  # to 62 positions, not to 64
        tokens, labels = batch(length)
        named = {"input_ids": tokens, "labels": labels}
        named["attention_mask"] = mask_of(tokens)
        wanted = model(**named)
        found = run(**named)
        torch.testing.assert_close(found.loss, wanted.loss)
        torch.testing.assert_close(found.logits, wanted.logits)
    assert len(backend._steps) == 2
    assert backend._last.plan.inputs


@pytest.mark.slow
def test_a_mask_and_what_a_batch_may_be_else() -> None:
    """Filled up along both dimensions; with dropout, which draws what it did."""
    model = Language(dropout=0.5)
    run, backend = compiled(model.eval(), ragged="pad")
    for rows, length in ((3, 34), (4, 37), (3, 40)):
        tokens, _ = batch(length, rows)
        assert_like_eager(run, model, tokens, None, mask_of(tokens))
    assert len(backend._steps) == 1
    run, backend = compiled(model.train(), ragged="fewer")
    for rows, length in ((3, 34), (4, 37), (4, 38)):
        run(*batch(length, rows))[0].backward()
    assert len(backend._steps) == 2
    with torch.no_grad():
        torch.testing.assert_close(run(batch(35)[0]).shape, torch.Size([4, 35, 32]))


def test_one_microbatch_autocast_and_gradients_of_inputs() -> None:
    class Embedded(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x).float().cumsum(1)

    model = Embedded(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    run, backend = compiled(model, {0: (-2, 0)}, schedule=schedules.gpipe(2, 1))
    for length in (9, 10):
        inputs = [torch.randn(4, length, 4) for _ in range(2)]
        inputs[1] = inputs[0].clone()
        for x, call in zip(inputs, (run, model), strict=True):
            call(x.requires_grad_()).square().mean().backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    assert len(backend._steps) == 1


def test_updates_in_the_program() -> None:
    model = Language()
    reference = copy.deepcopy(model)

    class Loss(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            return self.inner(tokens, labels)[0]

    own = torch.optim.SGD(model.parameters(), 0.1)
    other = torch.optim.SGD(reference.parameters(), 0.1)
    run, _ = compiled(Loss(model), LABELLED, optimizer=own)
    for length in (35, 33, 40):
        inputs = batch(length)
        loss = reference(*inputs)[0]
        torch.testing.assert_close(run(*inputs), loss)
        other.zero_grad()
        loss.backward()
        other.step()
    torch.testing.assert_close(model.state_dict(), reference.state_dict())


class Both(Language):
    """Sees all positions that a mask doesn't hide."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        return super().forward(tokens, labels, torch.ones_like(tokens))


class LastToken(Language):
    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return self.head(self.hidden(tokens, None)[:, -1])


class Mean(Language):
    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return self.hidden(tokens, None).mean(1)


class Counts(Language):
    """Divides by all positions, of which some are ignored."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        logits = super().forward(tokens)
        total = F.cross_entropy(logits.transpose(1, 2), labels, reduction="sum")
        return total / tokens.numel()


class Zero(Both):
    """What it sees of other positions is zero until it is trained."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.qkv.weight)
        nn.init.zeros_(self.qkv.bias)


class Norm(Language):
    """Statistics of all positions, and running ones."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(16, affine=False)

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        self.batch_norm(self.embed(tokens).transpose(1, 2))
        return super().forward(tokens)


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (Both, "output 0 depends"),
        (Zero, "output 0 depends"),
        (LastToken, "output 0 depends"),
        (Mean, "output 0 depends"),
        (Counts, "output 0 depends"),
        (Norm, "the buffer .*running_mean depends"),
    ],
)
@pytest.mark.filterwarnings("ignore::fxsched.RowsWarning")
def test_a_model_that_sees_what_is_added_is_refused(
    model: Callable[[], nn.Module], what: str
) -> None:
    labelled = model in (Both, Zero, Counts)
    more: Any = {"labels": (1, -100)} if labelled else {}
    run, _ = compiled(model(), {"tokens": (1, 0), **more})
    inputs = batch(39)[: 1 + labelled]  # to which one position is added
    with pytest.raises(PlanError, match=rf"\(39 to 40\), and {what} on what is added"):
        run(*inputs)


def test_labels_that_the_loss_does_not_ignore_are_refused() -> None:
    run, _ = compiled(Language(), {"tokens": (1, 0), "labels": (1, 0)})
    with pytest.raises(PlanError, match="output 0 depends on what is added; let the"):
        run(*batch(39))


def test_outputs_that_cannot_be_cut_and_lengths_that_do_not_run() -> None:
    class Flat(Language):
        def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(tokens).flatten(0, 1)

    class Table(Language):
        def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
            places = torch.arange(tokens.shape[1])
            return self.embed(tokens) + F.embedding(places, self.places)

    run, _ = compiled(Flat(), {"tokens": (1, 0)})
    with pytest.raises(PlanError, match="an output has samples and positions in one"):
        run(batch(39)[0])
    run, _ = compiled(Table(most=30), {"tokens": (1, 0)})
    with pytest.raises(PlanError, match="and the model doesn't run so: IndexError: in"):
        run(batch(29)[0])


def test_gradients_that_what_is_added_makes_nan_are_refused() -> None:
    class Own(Language):
        """Positions that are none see none: their softmax is of nothing."""

        def hidden(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
            x = self.embed(tokens)
            assert mask is not None
            both = mask[:, None].bool() & mask[..., None].bool()
            scores = (x @ self.qkv(x)[..., :16].mT).masked_fill(~both, -torch.inf)
            return scores.softmax(-1) @ x

    run, _ = compiled(Own())
    tokens, labels = batch(39)
    with pytest.raises(
        PlanError, match=r"softmax makes NaN, as gr[^\n]*\n  at .*scores"
    ):
        run(tokens, labels, torch.ones_like(tokens))


class Pair(nn.Module):
    """What takes an encoder's tokens, a decoder's, and a table of both lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 8)

    def forward(
        self, source: Tensor, target: Tensor, places: Tensor | None = None
    ) -> Tensor:
        x, y = self.head(self.embed(source)), self.head(self.embed(target))
        y = y if places is None else y + places[..., None]
        scores = (y @ x.mT).masked_fill((source == 0)[:, None], -torch.inf)
        return scores.softmax(-1) @ x


@pytest.mark.slow
def test_two_lengths_are_filled_up_each_to_its_own() -> None:
    model = Pair()
    run, backend = compiled(model, {"source": (1, 0), 1: (-1, 0)})
    for first, second in ((33, 17), (35, 20), (40, 18), (36, 36), (33, 1)):
        assert_like_eager(run, model, batch(first)[0], batch(second)[0])
    assert len(backend._steps) == 3  # 40 with 20, with 40, and with 1 as it is


def refused(message: str, lengths: Any, model: Any, *inputs: Any, **named: Any) -> None:
    run, _ = compiled(model, lengths)
    with pytest.raises(PlanError, match=message):
        run(*inputs, **named)


@pytest.mark.slow
def test_declarations_that_do_not_fit_the_call() -> None:
    (tokens, labels), model = batch(39), Language()
    refused(r"lengths='bucket'\) knows input_ids, inputs_", "bucket", model, tokens)
    refused(
        r"lengths=\{'x': \.\.\}\): the model is called wi", {"x": (1, 0)}, model, tokens
    )
    refused(
        r"\{'tokens': \(2, 0\)\}\): tokens has no", {"tokens": (2, 0)}, model, tokens
    )
    refused("up with 0.5, which is no value of", {"tokens": (1, 0.5)}, model, tokens)
    refused(
        "tokens and labels are one tensor, of which lengths= says different things",
        *(TOKENS, model, tokens, tokens),
    )
    refused(
        "fixes its length to 39; say what fills it up, "
        r"lengths=\{\"tokens\": \(1, 0\), \"labels\": \(1, 0\)\}",
        *({"tokens": (1, 0)}, model, tokens, labels),
    )


def test_what_is_as_long_and_not_declared() -> None:
    class Table(Language):
        def forward(self, tokens: Tensor, table: Tensor) -> Tensor:  # type: ignore
            return super().forward(tokens) + (table + table.mT)[..., :1]

    class Wide(Language):
        def forward(self, tokens: Tensor, table: Tensor) -> Tensor:  # type: ignore
            return super().forward(tokens) + table.sum(1)[..., None]

    class Fixed(Language):
        def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(tokens) + len(range(int(tokens.shape[1])))

    tokens, table = batch(39)[0], torch.zeros(4, 39, 39)
    lengths = {"tokens": (1, 0), "table": (1, 0)}
    refused(
        "up in one dimension alone: make it inside", lengths, Table(), tokens, table
    )
    torch._dynamo.mark_dynamic(table, 2)
    refused(
        r"dimension 2 of table, of shape \[4, 39, 39\], is as long as what",
        *({"tokens": (1, 0)}, Wide(), tokens, table),
    )
    refused(
        "fixes its length to 39; take sizes from its shape",
        *({"tokens": (1, 0)}, Fixed(), tokens),
    )


def test_options_that_are_none_or_do_not_go_with_it() -> None:
    def wrong(message: str, **options: Any) -> None:
        with pytest.raises(PlanError, match=message):
            fxsched.backend(GPIPE, **options)

    wrong(r"backend\(lengths='buckets'\): give 'bucket', for", lengths="buckets")
    wrong(r"lengths=\{'': \.\.\}\): name an argument", lengths={"": (1, 0)})
    wrong(r"\{'x': 1\}\): give the dimension with the length", lengths={"x": 1})
    for options in ({"rows": "local"}, {"input_from": 0}):
        wrong("doesn't go with rows='local' or inp", lengths="bucket", **options)


@pytest.mark.slow
def test_a_model_that_dynamo_breaks_is_traced_once() -> None:
    class Breaks(Language):
        def forward(self, tokens: Tensor, labels: Tensor) -> Any:  # type: ignore
            torch._dynamo.graph_break()
            return super().forward(tokens, labels)

    model = Breaks()
    run = fxsched.compile(model, GPIPE, lengths=LABELLED)
    for length in (35, 37, 41, 63):
        assert_like_eager(run, model, *batch(length))
    assert len(run.backend._steps) == 3
    assert len(run._compiled.forward.traces.traces) == 1
    run = fxsched.compile(Breaks(), GPIPE, lengths={"tokens": (1, 0)})
    with pytest.raises(PlanError, match="the model fixes its length to 39; say what f"):
        run(*batch(39))


@pytest.mark.slow
def test_plans_and_verify_take_it() -> None:
    model, inputs = Language(), batch(35)
    plan = fxsched.plan(model, GPIPE, *inputs, lengths=LABELLED)
    whole = fxsched.plan(model, GPIPE, *batch(40))
    assert plan.line == whole.line
    assert fxsched.verify(model, GPIPE, *inputs, lengths=LABELLED).passed


@pytest.mark.slow
def test_what_cannot_be_tried_is_said() -> None:
    class Shuffled(Language):
        def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(tokens) + torch.randperm(4).sum()

    run, _ = compiled(Shuffled(), {"tokens": (1, 0)})
    with pytest.warns(LengthsWarning, match="was not tried: .*randperm draws numbers"):
        run(batch(39)[0])


@pytest.mark.slow
def test_a_loss_of_nothing_does_not_tell() -> None:
    """A mean over no labels is NaN, whatever is added."""

    class Loss(Both):
        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            return super().forward(tokens, labels)[0]

    run, _ = compiled(Loss(), LABELLED)
    tokens, labels = batch(39)
    with pytest.warns(LengthsWarning, match="output 0 is not finite in this call"):
        run(tokens, torch.full_like(labels, -100))
    with pytest.raises(PlanError, match="output 0 depends on what is added"):
        run(tokens, labels)


@pytest.mark.slow
def test_ranks_share_plans_of_lengths() -> None:
    run_ranks(2, "tests.ranks_lengths")
