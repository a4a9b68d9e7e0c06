"""Models in which rows of the whole batch meet, equal to eager on the whole batch."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, Schedule, schedules
from fxsched.draw.tables import byte_text
from fxsched.ir import ops
from fxsched.runtime.tasks import sent
from tests import losses
from tests.started_ranks import run_ranks
from tests.whole_batch import compare


class Towers(nn.Module):
    """Two encoders and a loss over all pairs of the batch, as CLIP's."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 8))
        self.b = nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, 8))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def logits(self, x: Tensor, y: Tensor) -> Tensor:
        """x [batch, 6], y [batch, 5] -> [batch, batch]."""
        a, b = F.normalize(self.a(x), dim=-1), F.normalize(self.b(y), dim=-1)
        return self.scale.exp() * a @ b.T

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits, own = self.logits(x, y), torch.arange(len(x))
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


class Sigmoid(Towers):
    """The same with SigLIP's loss."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        signs = 2 * torch.eye(len(x)) - 1
        return -F.logsigmoid(signs * self.logits(x, y)).sum(-1).mean()


class Returned(Towers):
    """The same without a loss: it is computed of the logits outside."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.logits(x, y)


class Twisted(Towers):
    """A loss over all pairs of which one side is the batch itself."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(self.a(x)[:, :5] @ y.T, torch.arange(len(x)))


class Mixed(nn.Module):
    """Rows meet in the middle, once by `mix`, and go on in microbatches."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = mix
        self.before = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16))
        self.after = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.mse_loss(self.after(self.mix(self.before(x))), y)


MIXES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda h: h + torch.softmax(h, 0),
    "pairs": lambda h: torch.softmax(h @ h.T, -1) @ h,
    "statistics": lambda h: (h - h.mean(0)) / (h.std(0) + 0.1),
    "sorted": lambda h: h.sort(0).values,
    "cumsum": lambda h: h.cumsum(0),
    "largest": lambda h: h - h.max(0).values,
    "centred": lambda h: h - h.mean(0) / 2,
}


class Ratio(Mixed):
    """A loss that is a function of means over the batch: weights are learned."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = self.before(x)
        weights = torch.sigmoid(h[:, 0])
        error = ((self.after(h) - y) ** 2).mean(-1)
        return ((weights * error).sum() / weights.sum()).sqrt()


def train(
    make: Callable[[], nn.Module],
    schedule: Schedule,
    inputs: tuple[Tensor, ...],
    loss: Callable[[Any], Tensor] = lambda out: out,
    **options: Any,
) -> None:
    """Three steps of AdamW: losses and gradients as eager's on the whole batch."""
    torch.manual_seed(0)
    model = make()
    eager = copy.deepcopy(model)
    torch._dynamo.reset()
    step = torch.compile(model, backend=fxsched.backend(schedule, **options))
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (model, eager)]
    for _ in range(3):
        outputs = step(*inputs), eager(*inputs)
        torch.testing.assert_close(*outputs)
        for out in outputs:
            loss(out).backward()
        for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, 6), torch.randn(rows, 5)


def drawn(seed: int) -> Schedule:
    """w and n at random."""
    draw = random.Random(seed)
    keys = [(s, b, d) for s in range(6) for b in range(4) for d in "FBW"]
    keep = [draw.randrange(3) for _ in range(6)]
    run = {key: draw.randrange(3) for key in keys}
    rank = {key: draw.randrange(20) for key in keys}
    return Schedule(
        3,
        4,
        stages=3,
        w=lambda s, b, d: (keep[s], run[s, b, str(d)]),
        n=lambda s, b, d: rank[s, b, str(d)],
    )


SCHEDULES = {
    "gpipe": schedules.gpipe(2, 4),
    "1f1b": schedules.one_f_one_b(2, 4),
    "graph": schedules.graph(3, 4),
    "ddp": schedules.ddp(2, 4),
    "fsdp": schedules.fsdp(2, 4),
    "zb_h1": schedules.zb_h1(2, 4),
    "fslpp": schedules.fslpp(4, 2, 4),
    "drawn 1": drawn(1),
    "drawn 2": drawn(2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_loss_over_all_pairs_is_that_of_the_whole_batch(name: str) -> None:
    train(Towers, SCHEDULES[name], batch())


@pytest.mark.slow
@pytest.mark.parametrize("option", [{"order": "dynamic"}, {"carry": "recompute"}])
def test_in_any_order_and_with_gradient_caching(option: dict[str, str]) -> None:
    train(Towers, SCHEDULES["1f1b"], batch(), **option)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpipe", "graph", "zb_h1", "drawn 1"])
def test_sigmoid_losses(name: str) -> None:
    train(Sigmoid, SCHEDULES[name], batch())


class Shown(Sigmoid):
    """The loss and both kinds of logits, as transformers' models return them."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.logits(x, y)
        loss = super().forward(x, y) + Towers.forward(self, x, y)
        return {"loss": loss, "logits": logits, "turned": logits.T}


class Margins(Towers):
    """Losses with the diagonal, with masks of pairs, and with numbers of rows."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits, kinds, own = self.logits(x, y), y[:, 0] > 0, torch.arange(len(x))
        right = logits.diagonal()
        apart = (own[:, None] != own[None, :]) & (kinds[:, None] == kinds[None, :])
        more = torch.relu(0.2 + logits - right.unsqueeze(1)).mean()
        less = (torch.log_softmax(logits, 0) * apart).sum() / len(x)
        masked = logits.masked_fill(torch.eye(len(x)).bool(), 0).sum(1)
        return more - less + masked.pow(2).mean() - logits.diag().mean()


class Labelled(Towers):
    """A loss over pairs beside a mean over labels, some of which are ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        labels = torch.where(x[:, 0] > 0, y.argmax(1), -100)
        return super().forward(x, y) + F.cross_entropy(self.head(self.a(x)), labels)


SPREAD = {
    "ddp": Towers,
    "1f1b": Sigmoid,
    "graph": Shown,
    "zb_h1": Towers,
    "drawn 2": Sigmoid,
    "fsdp": Margins,
    "fslpp": Labelled,
    "gpipe": lambda: Mixed(MIXES["pairs"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPREAD)
def test_microbatches_compute_their_rows_of_pairs(name: str) -> None:
    """Their losses, outputs and gradients; nothing but what is gathered is joint."""
    make = SPREAD[name]
    plan = fxsched.plan(make(), SCHEDULES[name], *batch(), pairs="spread")
    joint = [d for _, d in plan.stages.nodes(data=True) if d.get("joint")]
    assert joint and not any(data["flops"] for data in joint)
    train(
        make,
        SCHEDULES[name],
        batch(),
        lambda out: out["loss"] if isinstance(out, dict) else out,
        pairs="spread",
    )


@pytest.mark.slow
def test_pairs_are_spread_where_the_step_should_be_shorter() -> None:
    few, many = (batch(rows) for rows in (8, 1024))
    text = (
        r"pairs of rows {}: [\d.]+ .s a step without sums of.gradients; {}:\s[\d.]+\s.s"
    )
    places = "spread over microbatches", "in a global-batch stage"
    one, other, asked = (
        fxsched.plan(Towers(), schedules.ddp(4, 4), *many, pairs=pairs)
        for pairs in ("auto", "joint", "spread")
    )
    assert re.search(text.format(*places), " ".join(one.explain().split())), (
        one.explain()
    )
    assert one.simulate().latency < other.simulate().latency
    assert asked.simulate().latency == one.simulate().latency
    small = fxsched.plan(Towers(), schedules.graph(2, 2), *few)
    assert re.search(text.format(*reversed(places)), " ".join(small.explain().split()))
    held, whole = (
        max(each.at_once.total for each in plan.memory) for plan in (one, other)
    )
    assert held < whole / 2  # a quarter of the pairs, and what is gathered


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpipe", "fsdp"])
def test_what_is_of_all_pairs_comes_back_whole(name: str) -> None:
    own = torch.arange(8)
    train(Returned, SCHEDULES[name], batch(), lambda out: F.cross_entropy(out, own))


@pytest.mark.parametrize("number, mix", [*enumerate(MIXES)])
def test_rows_meet_in_the_middle(number: int, mix: str) -> None:
    name = ("1f1b", "graph", "drawn 2")[number % 3]
    train(lambda: Mixed(MIXES[mix]), SCHEDULES[name], batch())


@pytest.mark.slow
def test_a_plan_says_what_workers_send_of_a_joint_stages_gradients() -> None:
    plan = fxsched.plan(Towers(), schedules.ddp(2, 2), *batch(), pairs="joint")
    sizes = [
        sum(spec.bytes for spec in sent(node).specs)
        for program in plan.programs
        for node in program.graph.find_nodes(op="call_function", target=ops.send)
    ]
    assert f"{len(sizes)} messages, {byte_text(sum(sizes))}\n" in str(plan)


def test_microbatches_go_on_after_rows_have_met() -> None:
    plan = fxsched.plan(Mixed(MIXES["softmax"]), SCHEDULES["gpipe"], *batch())
    joint = [s for s, whole in plan.stages.nodes(data="joint") if whole]
    assert joint == [2]
    assert set(plan.stages.edges) == {(0, 1), (0, 2), (2, 1)}
    jobs = {str(event.job) for event in plan.timeline}
    assert {"2F*", "2B*", "1F3", "0B0"} <= jobs


def test_microbatches_read_what_has_no_rows_as_it_is() -> None:
    """The mean alone is joint: its numbers travel, and no rows."""
    plan = fxsched.plan(Mixed(MIXES["centred"]), SCHEDULES["gpipe"], *batch())
    assert {s for s, whole in plan.stages.nodes(data="joint") if whole} == {2}
    sizes = {(a, b): e["bytes"] for a, b, e in plan.stages.edges(data=True)}
    assert sizes == {(0, 1): 2 * 16 * 4, (0, 2): 16 * 4, (2, 1): 16 * 4}
    assert plan.stages.edges[2, 1]["whole"] == 16 * 4
    sender, reader = plan.simulate().workers
    assert sender.activations_sent == 4 + 1  # the mean once
    assert reader.activations_sent == 4 + 1  # gradients of it are added up first
    link = fxsched.simulate(plan.schedule, plan.stages, None, fxsched.Link(64.0))
    starts = {str(event.job): event.start for event in link.timeline}
    assert starts["2B*"] == pytest.approx(starts["1F0"] + 4 * 2 + 1, abs=0.1)
    nothing = plan.stages.copy()
    nothing.edges[2, 1]["whole"] = 0
    held, less = (
        fxsched.simulate(plan.schedule, stages, None).memory[1].each.activations
        for stages in (plan.stages, nothing)
    )
    # once for all microbatches; its gradient comes when activations have gone
    assert held - less == 16 * 4


@pytest.mark.parametrize("mix", ["centred", "softmax", "statistics"])
def test_stages_that_the_user_names_are_cut_where_rows_meet(mix: str) -> None:
    train(lambda: Mixed(MIXES[mix]), SCHEDULES["1f1b"], batch(), stages=["after"])
    train(lambda: Mixed(MIXES[mix]), SCHEDULES["ddp"], batch(), stages=["before.2"])


@pytest.mark.slow
def test_functions_of_sums_over_the_batch_take_numbers_not_rows() -> None:
    train(lambda: Ratio(MIXES["softmax"]), SCHEDULES["1f1b"], batch())
    plan = fxsched.plan(Ratio(MIXES["softmax"]), SCHEDULES["1f1b"], *batch())
    (joint,) = [s for s, whole in plan.stages.nodes(data="joint") if whole]
    assert all(e["bytes"] <= 8 for _, _, e in plan.stages.in_edges(joint, data=True))


def test_no_mixing_no_joint_stage() -> None:
    plan = fxsched.plan(Mixed(lambda h: h), SCHEDULES["gpipe"], *batch())
    assert not any(plan.stages.nodes[s].get("joint") for s in plan.stages)


@pytest.mark.slow
def test_without_gradients() -> None:
    model = Towers()
    step = torch.compile(model, backend=fxsched.backend(SCHEDULES["1f1b"]))
    with torch.no_grad():
        torch.testing.assert_close(step(*batch()), model(*batch()))


@pytest.mark.slow
def test_updates_inside_a_batch_that_meets_are_refused() -> None:
    model = Towers()
    schedule = replace(SCHEDULES["gpipe"], update_every=2)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(PlanError, match="update_every=2: rows of all 4 microbatches"):
        fxsched.plan(model, schedule, *batch(), optimizer=optimizer)


@pytest.mark.slow
def test_an_optimizer_in_the_program() -> None:
    model, eager = Towers(), Towers()
    eager.load_state_dict(model.state_dict())
    mine, theirs = (torch.optim.AdamW(m.parameters(), 1e-2) for m in (model, eager))
    backend = fxsched.backend(SCHEDULES["1f1b"], optimizer=mine)
    step = torch.compile(model, backend=backend)
    for _ in range(3):
        loss = step(*batch())
        expected = eager(*batch())
        torch.testing.assert_close(loss, expected)
        expected.backward()
        theirs.step()
        theirs.zero_grad()
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_padding_a_batch_that_meets_is_refused() -> None:
    model = Mixed(MIXES["softmax"])
    model.forward = lambda x: model.after(model.mix(model.before(x)))  # type: ignore
    backend = fxsched.backend(SCHEDULES["gpipe"], ragged="pad")
    with pytest.raises(
        PlanError, match="would change the results of the other samples"
    ):
        torch.compile(model, backend=backend)(batch(7)[0])


@pytest.mark.slow
def test_two_ranks() -> None:
    done = run_ranks(2, "tests.ranks_whole_batch")
    assert done.stdout.count("equal to eager") == 8, done.stdout
    assert done.stdout.count("refused, ") == 2, done.stdout


@pytest.mark.parametrize(
    "name",
    [
        *("pdist", "lstm", "lstm from a mean", "expanded mean", "sum times size"),
        *("view across rows", "barlow twins", "segment", "hardswish", "mean and sum"),
        *("mean written", "sum written over", "rows written", "masked mean"),
        "product of two orders",
    ],
)
def test_what_no_rule_knows_runs_on_all_rows(name: str) -> None:
    row = losses.compare(name)
    assert row.far is not None and row.equal
    assert row.joint is not (name in ("lstm", "hardswish"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["retrieval", "llama items"])
def test_models_as_people_train_them(name: str) -> None:
    assert compare(name, "1f1b", "static", 2).kind == "equal"
