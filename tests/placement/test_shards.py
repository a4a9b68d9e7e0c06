"""Stages cut into shards are the model: losses, gradients and parameters."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import Direction, Placement, PlanError, Schedule, schedules
from fxsched.jobs.job import Job, Piece, whole_stage
from fxsched.models.gpt import GPT, GPTConfig
from fxsched.passes import shard_graph
from tests.cases import assert_equal, build, eager_step, train

F, B, *_ = Direction
BY_NAME = {
    "blocks.*.attention.query": "column",
    "blocks.*.attention.key": "column",
    "blocks.*.attention.value": "column",
    "blocks.*.attention.out": "row",
    "blocks.*.feed.0": "column",
    "blocks.*.feed.2": "row",
}


def placed_at_random() -> Schedule:
    draw = random.Random(0)
    places: dict[Any, int] = {}

    def w(s: int, b: int, d: Direction, p: int) -> tuple[int, int]:
        keeper = places.setdefault((s, p), draw.randrange(4))
        return keeper, places.setdefault((s, b, d, p), draw.randrange(4))

    return Schedule(4, 4, stages=2, shards=2, w=w, name="random")


SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "alone": lambda: schedules.sharded(schedules.gpipe(1, 4), 2),
    "four": lambda: schedules.sharded(schedules.gpipe(1, 4), 4),
    "1f1b": lambda: schedules.sharded(schedules.one_f_one_b(2, 4), 2),
    "zb_h1": lambda: schedules.sharded(schedules.zb_h1(2, 4), 2),
    "graph": lambda: schedules.sharded(schedules.graph(2, 4), 2),
    "replicas": lambda: schedules.replicate(
        schedules.sharded(schedules.one_f_one_b(2, 2), 2), 2
    ),
    "of replicas": lambda: schedules.sharded(
        schedules.replicate(schedules.gpipe(1, 2), 2), 2
    ),
    "fsdp": lambda: schedules.sharded(schedules.fsdp(2, 4), 2),
    "random": placed_at_random,
}


def check(name: str, schedule: Schedule, **options: Any) -> None:
    """Three steps of AdamW, planned and in eager PyTorch."""
    model, inputs = build(name)
    eager = copy.deepcopy(model)
    run = torch.compile(model, backend=fxsched.backend(schedule, **options))

    def step() -> Tensor:
        loss: Tensor = run(*inputs)
        loss.backward()
        return loss

    count = schedule.microbatches
    wanted = train(eager, lambda: eager_step(eager, inputs, count), "adamw")
    assert_equal(train(model, step, "adamw"), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_schedule_in_shards_equals_eager(schedule: str) -> None:
    check("gpt", SCHEDULES[schedule]())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shards"),
    [("two_tower", 4), ("encoder_decoder", 2), ("experts", 2), ("unet", 4)],
)
def test_any_model_in_shards_equals_eager(name: str, shards: int) -> None:
    check(name, schedules.sharded(schedules.one_f_one_b(2, 4), shards))


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        BY_NAME,
        {"blocks.*.feed.0": "column", "blocks.*.feed.2": "row"},
        {"blocks.0.feed.0": "column"},  # what it makes is gathered
        {"blocks.0.feed.2": "row"},  # each shard takes its part of what it reads
    ],
)
def test_weights_cut_by_name_equal_eager(words: dict[str, str]) -> None:
    check("gpt", schedules.sharded(schedules.gpipe(2, 4), 2), shards=words)


@pytest.mark.slow
def test_a_mask_of_as_many_rows_as_heads_is_not_cut() -> None:
    check("three_encoder", schedules.sharded(schedules.gpipe(1, 4), 2))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"carry": "recompute"}, {"order": "dynamic"}])
def test_shards_go_with_options(options: dict[str, Any]) -> None:
    check("gpt", SCHEDULES["1f1b"](), **options)


@pytest.mark.slow
def test_shards_go_with_autocast_around_the_call() -> None:
    model, inputs = gpt()
    found = []
    for schedule in (schedules.gpipe(1, 4), SCHEDULES["alone"]()):
        model.zero_grad()
        run = torch.compile(model, backend=fxsched.backend(schedule))
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(*inputs)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole, rtol=0.1, atol=0.02)


def gpt(**sizes: Any) -> tuple[GPT, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=64, width=32, layers=2, **sizes))
    return model, (torch.randint(1, 30, (8, 16)), torch.randint(1, 30, (8, 16)))


@pytest.mark.slow
def test_dropout_draws_the_numbers_that_it_draws_without_shards() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            hidden = nn.functional.dropout(self.up(x).relu(), 0.4)
            return nn.functional.dropout(self.down(hidden), 0.4).square().mean()

    torch.manual_seed(0)
    model, x = Dropped(), torch.randn(8, 16)
    gradients = []
    for schedule in (
        schedules.gpipe(1, 2),
        schedules.sharded(schedules.gpipe(1, 2), 2),
    ):
        model.zero_grad()
        torch.manual_seed(1)
        torch.compile(model, backend=fxsched.backend(schedule))(x).backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients)


@pytest.mark.slow
def test_a_block_has_two_sums_forward_and_two_backward() -> None:
    model, inputs = gpt()
    plan = fxsched.plan(model, SCHEDULES["alone"](), *inputs)
    jobs = [job for job in plan.jobs if job.microbatch == 0]
    for direction in (F, B):
        # a shard's pieces end at sums: the first begins with what shard 0 gives it
        pieces = [j for j in jobs if j.direction is direction and shard(j) == 1]
        assert len(pieces) == 2 * len(model.blocks)


class Idle(nn.Module):
    """A feed-forward layer, and one whose result nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down, self.idle = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.down(torch.relu(self.up(x)))
        values = [y, y + self.idle(x)]
        return values[0].square().mean()


def test_what_is_made_for_nothing_is_left_out() -> None:
    torch.manual_seed(0)
    model, x = Idle(), torch.randn(8, 8)
    eager = copy.deepcopy(model)
    schedule = schedules.sharded(schedules.gpipe(2, 2), 2)
    run = torch.compile(model, backend=fxsched.backend(schedule))
    loss = run(x)
    loss.backward()
    wanted = eager_step(eager, (x,), 2)
    torch.testing.assert_close(loss, wanted)
    for mine, its in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)
    assert model.idle.weight.grad is None


def shard(job: Job) -> int:
    assert isinstance(job.stage, Piece)
    return job.stage.shard


@pytest.mark.slow
@pytest.mark.parametrize("shards", [2, 4])
def test_each_shard_has_its_share_of_the_blocks(shards: int) -> None:
    model, inputs = gpt()
    schedule = schedules.sharded(schedules.gpipe(1, 2), shards)
    plan = fxsched.plan(model, schedule, *inputs)
    numbers = [0] * shards
    blocks = sum(p.numel() for p in model.blocks.parameters())
    for group in plan.groups:
        for state in group.state:
            if state.name.startswith("blocks"):
                cut = next(
                    (
                        p
                        for p in plan.parts.values()
                        if state.name.endswith(f"/{p.cut.parts}]")
                    ),
                    None,
                )
                whole = model.get_parameter(state.name.split("[")[0]).numel()
                for worker in group.owners:
                    numbers[worker] += whole // (shards if cut else 1)
    assert max(numbers) <= (1 / shards + 0.05) * blocks


@pytest.mark.slow
def test_a_stage_stays_one_in_tables() -> None:
    model, inputs = gpt()
    plan = fxsched.plan(model, SCHEDULES["1f1b"](), *inputs)
    assert "1f1b x 2 shards: 4 workers, 4 microbatches, 2 stages" in plan.explain()
    rows = [
        line.split()[0] for line in plan.explain().split("\n") if line[:1].isdigit()
    ]
    assert rows[:3] == ["1f1b", "0", "1"]
    assert "0F0.1/2" in str(plan.table(1))


@pytest.mark.slow
def test_explain_says_what_is_cut_and_why_the_rest_is_not() -> None:
    model, inputs = gpt()
    text = fxsched.plan(model, SCHEDULES["1f1b"](), *inputs).explain()
    rows = [" ".join(line.split()) for line in text.split("\n")]
    assert "blocks.*.attention.query.weight 2 32 x 32 column" in rows
    assert "blocks.*.feed.2.weight 2 32 x 128 row" in rows
    assert "tokens.weight 1 64 x 32 whole: cutting it makes the step slower" in rows
    assert "88.9 % of these weights are cut: each of 2 shards keeps 44.4 %; " in text


def test_a_job_of_a_shard_prints_its_shard() -> None:
    assert str(Job(Piece(7, 2, 1, 0), 0, F)) == "2F0.1"
    assert str(Job(Piece(9, 2, 1, 3), 4, B)) == "2B4.1/3"


@pytest.mark.slow
def test_w_and_n_take_the_shard_as_a_fourth_argument() -> None:
    asked = set()

    def w(s: int, b: int, d: Direction, p: int) -> Placement:
        asked.add(p)
        return Placement(p, p)

    model, inputs = gpt()
    schedule = Schedule(2, 2, stages=1, shards=2, w=w, n=lambda s, b, d: b)
    plan = fxsched.plan(model, schedule, *inputs)
    assert asked == {0, 1}
    assert {shard(j): p.compute for j, p in plan.placements.items()} == {0: 0, 1: 1}


def test_an_argument_with_a_default_is_not_taken_for_the_shard() -> None:
    given = [lambda s, b, d, k=k: Placement(k, k) for k in range(2)]
    schedule = Schedule(2, 2, stages=1, shards=2, w=given[1])
    assert schedule.place(Job(0, 0, F), 0) == Placement(1, 1)


@pytest.mark.slow
def test_a_wrong_rule_is_found_before_it_trains(monkeypatch: Any) -> None:
    model, inputs = gpt()

    def first_part(self: Any, node: Any, p: int) -> Any:
        return self._parts[node, 0]

    monkeypatch.setattr(shard_graph.Rewriter, "_sum", first_part)
    with pytest.raises(PlanError, match="compute another value of out than the"):
        fxsched.plan(model, SCHEDULES["alone"](), *inputs)


def plan_gpt(schedule: Schedule, **options: Any) -> None:
    model, inputs = gpt()
    fxsched.plan(model, schedule, *inputs, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shards", "words", "message"),
    [
        (3, "auto", r"no weight can be cut into 3 equal parts so that the shards' "),
        (
            8,
            {"blocks.*.attention.query": "column"},
            r"attention.query.weight can't be cut into 8 parts: heads or blocks in unf",
        ),
        (
            3,
            {"blocks.0.feed.0": "column"},
            "its shape is 128 x 32, and no column dimension divides",
        ),
        (
            3,
            {"head": "column"},
            "tokens.weight can't .*: its shape is 64 x 32, and no",
        ),
        (
            2,
            {"blocks.0.fed": "row"},
            r"names no module with a weight of two dimensions",
        ),
        (
            2,
            {"blocks.0.feed.0": "rows"},
            r"'rows'}\): give names of modules, in which ",
        ),
        (2, {}, r"plan\(shards={}\): give 'auto', or such as"),
    ],
)
def test_what_cannot_be_cut_is_said(shards: int, words: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_gpt(schedules.sharded(schedules.gpipe(1, 2), shards), shards=words)


def test_an_operation_without_a_rule_that_is_named_is_said() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = nn.Bilinear(4, 4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.both(x, x).square().mean()

    schedule = schedules.sharded(schedules.gpipe(1, 2), 2)
    with pytest.raises(PlanError, match="bilinear in both has no rule for that\n  at"):
        fxsched.plan(Pairs(), schedule, torch.randn(4, 4), shards={"both": "row"})


def test_names_without_shards_are_refused() -> None:
    with pytest.raises(PlanError, match=r"the schedule has one shard; give it fxsched"):
        plan_gpt(schedules.gpipe(1, 2), shards=BY_NAME)


def test_a_model_with_nothing_to_cut_is_refused() -> None:
    model, x = nn.LayerNorm(8), torch.randn(4, 8)
    schedule = schedules.sharded(schedules.gpipe(1, 2), 2)
    with pytest.raises(PlanError, match="no weight can be cut into 2 equal parts"):
        fxsched.plan(model, schedule, x)


def test_deterministic_shards_are_refused() -> None:
    with pytest.raises(PlanError, match=r"shards=2\) doesn't go with deterministic=Tr"):
        fxsched.backend(SCHEDULES["alone"](), deterministic=True)


def test_sharded_says_what_is_wrong() -> None:
    once = schedules.sharded(schedules.gpipe(2, 4), 2)
    with pytest.raises(
        PlanError, match=r"give sharded\(schedule, 4\) the schedule with"
    ):
        schedules.sharded(once, 2)
    with pytest.raises(PlanError, match=r"sharded\(schedule=3\): give a Schedule"):
        schedules.sharded(3, 2)  # type: ignore[arg-type]
    with pytest.raises(
        PlanError, match=r"sharded\(shards=0\): give an int of 1 or more"
    ):
        schedules.sharded(schedules.gpipe(2, 4), 0)
    with pytest.raises(
        PlanError, match=r"Schedule\(shards=0\): give an int of 1 or mo"
    ):
        Schedule(2, 4, shards=0)
    with pytest.raises(
        PlanError, match=r"workers=2, shards=4\): two shards of a stage"
    ):
        Schedule(2, 4, shards=4)


def test_a_profile_of_shards_is_of_the_models_stages() -> None:
    model, inputs = build("gpt")
    plan = fxsched.plan(model, SCHEDULES["1f1b"](), *inputs)

    def measured(pace: float) -> dict[str, Any]:
        """Where the jobs of stage 1 take so many times as long."""
        taken = [
            e._replace(end=e.start + (e.end - e.start) * pace)
            if whole_stage(e.job.stage)
            else e
            for e in plan.timeline
        ]
        return plan.profile(taken).measured

    once, twice = measured(1.0), measured(2.0)
    stages = {key: node.stage for key, node in plan.nodes.items()}
    assert {*stages.values()} >= {0, 1}
    for key, stage in stages.items():
        wanted = [each * (2 if stage == 1 else 1) for each in once[key]]
        assert list(twice[key]) == pytest.approx(wanted)
