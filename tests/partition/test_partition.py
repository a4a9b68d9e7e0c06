"""The automatic split of real models: balanced, branches apart, as the user wants."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxsched
from fxsched import Network, PlanError, Rate, Schedule, schedules
from fxsched.clock.stage_graph import run_stages, worker_bytes
from fxsched.ir.request import Request
from fxsched.models.gpt import GPT, GPTConfig
from fxsched.models.three_encoder import ThreeEncoder, ThreeEncoderConfig
from fxsched.partition.cut_cost import Problem
from fxsched.partition.planner import choose_cut
from fxsched.passes import partition


class Towers(nn.Module):
    """Branches of equal linear layers, called in turns, and a head."""

    def __init__(self, branches: int, layers: int) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
            for _ in range(branches)
        )
        self.head = nn.Linear(16 * branches, 16)

    def forward(self, *inputs: Tensor) -> Tensor:
        values = list(inputs)
        for depth in range(len(self.towers[0])):
            for i, tower in enumerate(self.towers):
                values[i] = torch.tanh(tower[depth](values[i]))
        return self.head(torch.cat(values, 1)).mean()


class Chain(nn.Module):
    """Equal linear layers in a row, with marks after some of them."""

    def __init__(self, layers: int, marks: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        self.marks = marks

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if i in self.marks:
                x = fxsched.stage_boundary(x)
        return x.mean()


def rows(count: int = 8) -> Tensor:
    return torch.ones(count, 16)


def modules(plan: fxsched.Plan) -> list[list[str]]:
    return [plan.stages.nodes[s]["modules"] for s in sorted(plan.stages)]


def towers_of(names: list[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("towers")}


def seconds(plan: fxsched.Plan) -> list[float]:
    nodes = plan.stages.nodes
    return [nodes[s]["forward"] + nodes[s]["backward"] for s in sorted(plan.stages)]


@pytest.mark.slow
@pytest.mark.parametrize("stages", [3, 4, 6])
def test_parallel_branches_are_in_different_stages(stages: int) -> None:
    inputs = [rows() for _ in range(3)]
    plan = fxsched.plan(Towers(3, 4), schedules.gpipe(stages, 4), *inputs)
    found = [towers_of(names) for names in modules(plan)]
    assert all(len(towers) <= 1 for towers in found[: stages - 1]), found
    assert set.union(*found) == {"0", "1", "2"}


@pytest.mark.slow
def test_parallel_branches_take_turns_in_the_numbers_of_stages() -> None:
    plan = fxsched.plan(Towers(2, 8), schedules.gpipe(4, 4), rows(), rows())
    first, second, *_ = (towers_of(names) for names in modules(plan))
    assert len(first) == len(second) == 1 and first != second


def test_values_go_straight_to_the_stage_that_reads_them() -> None:
    inputs = [rows() for _ in range(3)]
    plan = fxsched.plan(Towers(3, 1), schedules.gpipe(4, 4), *inputs)
    assert sorted(plan.stages.edges) == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.slow
def test_fewer_stages_than_branches_share_one() -> None:
    inputs = [rows() for _ in range(3)]
    plan = fxsched.plan(Towers(3, 4), schedules.gpipe(2, 4), *inputs)
    assert max(seconds(plan)) <= 1.25 * sum(seconds(plan)) / 2


class Captured(Exception):
    pass


def capture(
    model: nn.Module, count: int, *inputs: Tensor
) -> tuple[Problem, list[list[fx.Node]]]:
    """What the planner is given for a model: units, and the nodes in each."""
    found: list[Any] = []

    def problem(blocks: list[list[fx.Node]], request: Request) -> Problem:
        found.extend([original(blocks, request), blocks])
        raise Captured

    original = partition.cut_problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "cut_problem", problem)
        with pytest.raises(Captured):
            fxsched.plan(model, schedules.gpipe(1, count), *inputs)
    return found[0], found[1]


@cache
def gpt12() -> tuple[Problem, list[float]]:
    """A GPT of 12 blocks as the planner sees it, and the seconds of its parts: what is
    before, each block, what is after."""
    tokens = torch.ones(16, 32, dtype=torch.int64)
    model = GPT(GPTConfig(vocabulary=512, width=128, layers=12))
    problem, blocks = capture(model, 4, tokens, tokens)
    parts = [0.0] * 14
    for unit, block in zip(problem.units, blocks, strict=True):
        names = [re.match(r"blocks\.(\d+)", node.meta["module"]) for node in block]
        inside = [int(match[1]) + 1 for match in names if match]
        last = any(node.meta["module"] in ("norm", "head") for node in block)
        after = last or any("cross_entropy" in node.name for node in block)
        parts[inside[0] if inside else 13 if after else 0] += unit.seconds
    return problem, parts


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3, 4, 6, 8])
def test_gpt_is_balanced_and_no_worse_than_cuts_between_blocks(
    stages: int, record_property: Callable[[str, object], None]
) -> None:
    problem, parts = gpt12()
    schedule = schedules.one_f_one_b(stages, 32)
    cut = choose_cut(problem, schedule).cut
    busy = [0.0] * stages
    for unit, stage in zip(problem.units, cut, strict=True):
        busy[stage] += unit.seconds
    by_hand = min(
        max(sum(parts[a:b]) for a, b in itertools.pairwise((0, *ends, len(parts))))
        for ends in itertools.combinations(range(1, len(parts)), stages - 1)
    )
    mean = sum(busy) / stages
    record_property(
        "balance",
        f"gpt of 12 blocks in {stages} stages: slowest {max(busy) / mean:.3f} x the "
        "mean, "
        f"{max(busy) / by_hand:.3f} x the best cut between blocks",
    )
    assert max(busy) <= 1.10 * mean
    assert max(busy) <= by_hand * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["graph", "one_f_one_b"])
def test_each_of_three_encoders_has_its_own_worker(name: str) -> None:
    config = ThreeEncoderConfig(vocabulary=64, width=32)
    c = config
    inputs = (
        torch.randn(16, 1, c.image_height, c.image_width),
        torch.randint(1, 64, (16, c.text_length)),
        torch.randn(16, c.audio_frames, c.audio_bins),
        torch.arange(16) % 2.0,
    )
    schedule: Schedule = getattr(schedules, name)(4, 8)
    plan = fxsched.plan(ThreeEncoder(config), schedule, *inputs)
    homes: dict[str, set[int]] = {"image": set(), "text": set(), "audio": set()}
    for job, placement in plan.placements.items():
        for module in plan.stages.nodes[job.stage]["modules"]:
            if ".blocks" in module or module in homes:
                homes[module.split(".")[0]].add(placement.compute)
    ends = {min(workers) for workers in homes.values()}
    assert len(ends) == 3 and all(homes.values())
    # each encoder sends to the trunk alone, nothing through another encoder
    assert sorted(plan.stages.edges) == [(0, 3), (1, 3), (2, 3)]


def test_a_mark_in_the_model_ends_a_stage() -> None:
    plan = fxsched.plan(Chain(8, (0, 5)), schedules.gpipe(3, 4), rows())
    assert modules(plan) == [
        ["layers.0"],
        [f"layers.{i}" for i in range(1, 6)],
        ["layers.6", "layers.7"],
    ]


def test_marks_end_stages_beside_named_modules() -> None:
    plan = fxsched.plan(
        Chain(4, (0,)), schedules.gpipe(3, 4), rows(), stages=["layers.2"]
    )
    assert modules(plan) == [["layers.0"], ["layers.1"], ["layers.2", "layers.3"]]


def test_a_marked_model_gives_the_same_values_compiled_or_not() -> None:
    model = Chain(4, (1,))
    plain = copy.deepcopy(model)
    plain.marks = ()
    run = torch.compile(model, backend=fxsched.backend(schedules.gpipe(2, 4)))
    x = torch.randn(8, 16)
    run(x).backward()
    plain(x).backward()
    assert torch.equal(model(x), plain(x))
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_more_marks_than_stages_are_an_error() -> None:
    with pytest.raises(PlanError, match=r"each stage_boundary; .*more stages"):
        fxsched.plan(Chain(8, (0, 3, 5)), schedules.gpipe(2, 4), rows())


def test_a_group_of_modules_stays_in_one_stage() -> None:
    plan = fxsched.plan(
        Chain(8),
        schedules.gpipe(2, 4),
        rows(),
        same_stage=[["layers.1", "layers.6"]],
    )
    found = [names for names in modules(plan) if "layers.1" in names]
    assert {f"layers.{i}" for i in range(1, 7)} <= set(found[0])


def test_a_group_of_modules_that_do_not_exist_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"same_stage names module 'layer\.1'.*layers"):
        fxsched.plan(
            Chain(8),
            schedules.gpipe(2, 4),
            rows(),
            same_stage=[["layer.1", "layers.6"]],
        )


@pytest.mark.parametrize("value", ["layers.1", ["layers.1"], [[]]])
def test_groups_are_lists_of_names(value: Any) -> None:
    with pytest.raises(PlanError, match="give groups of names"):
        fxsched.backend(schedules.gpipe(2, 4), same_stage=value)


def test_more_stages_than_can_be_cut_are_an_error() -> None:
    with pytest.raises(
        PlanError, match=r"wants 40 stages.*17 at most; give a schedule of"
    ):
        fxsched.plan(Chain(8), schedules.gpipe(40, 4), rows())


class Bulky(nn.Module):
    """Layers of which the first has most of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4096, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.table(x)
        for layer in self.layers:
            y = torch.tanh(layer(y))
        return y.mean()


@pytest.mark.slow
def test_a_memory_limit_moves_work_away_from_a_full_worker() -> None:
    tokens = torch.randint(0, 4096, (64, 32))
    schedule = schedules.gpipe(2, 4)
    free = fxsched.plan(Bulky(), schedule, tokens)
    most = max(held(free))
    limited = fxsched.plan(Bulky(), schedule, tokens, memory_limit=0.9 * most)
    assert max(held(limited)) <= 0.95 * most
    assert max(seconds(limited)) >= max(seconds(free))


def held(plan: fxsched.Plan) -> list[float]:
    events = run_stages(plan.schedule, plan.stages)
    return worker_bytes(plan.schedule, plan.stages, events)


@pytest.mark.slow
def test_a_memory_limit_that_no_cut_meets_says_what_can_be_reached() -> None:
    tokens = torch.randint(0, 4096, (64, 32))
    limit = 4096 * 16 * 8  # the table and its gradient, and nothing else
    with pytest.raises(PlanError, match=r"no cut keeps.*best found holds (\d+)") as e:
        fxsched.plan(Bulky(), schedules.gpipe(2, 4), tokens, memory_limit=limit)
    found = re.search(r"holds (\d+)", str(e.value))
    assert found is not None
    reachable = int(found[1])
    assert reachable > limit
    fxsched.plan(Bulky(), schedules.gpipe(2, 4), tokens, memory_limit=reachable + 1)


@pytest.mark.parametrize("limit", [0, -1.0])
def test_a_memory_limit_must_be_above_zero(limit: float) -> None:
    with pytest.raises(PlanError, match="memory_limit"):
        fxsched.backend(schedules.gpipe(2, 4), memory_limit=limit)


class Masked(nn.Module):
    """Layers that all read one mask, made from the input."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        keep = (x > 0).to(x.dtype)
        for layer in self.layers:
            x = torch.tanh(layer(x)) * keep
        return x.mean()


@pytest.mark.slow
def test_cheap_values_are_computed_where_they_are_read() -> None:
    plan = fxsched.plan(Masked(8), schedules.gpipe(4, 4), rows())
    assert sorted(plan.stages.edges) == [(0, 1), (1, 2), (2, 3)]
    size = 2 * 16 * 4  # one activation of a microbatch
    assert {data["bytes"] for *_, data in plan.stages.edges(data=True)} == {size}


def test_a_value_that_is_written_into_is_not_computed_twice() -> None:
    class Written(Masked):
        def forward(self, x: Tensor) -> Tensor:
            keep = (x > 0).to(x.dtype)
            for layer in self.layers:
                x = torch.tanh(layer(x)) + keep
                keep.mul_(0.5)
            return x.mean()

    model, x = Written(4), torch.randn(8, 16)
    run = torch.compile(model, backend=fxsched.backend(schedules.gpipe(2, 4)))
    torch.testing.assert_close(run(x), copy.deepcopy(model)(x))


def test_what_is_frozen_has_no_backward_work_and_is_balanced_so() -> None:
    model = Chain(12)
    for layer in list(model.layers)[:10]:
        layer.requires_grad_(False)
    plan = fxsched.plan(model, schedules.gpipe(2, 4), rows())
    assert plan.stages.nodes[0]["backward"] == 0
    assert not any(job.stage == 0 and str(job.direction) == "B" for job in plan.jobs)
    assert len(modules(plan)[0]) > 6  # more than half: they cost less
    assert max(seconds(plan)) <= 1.3 * min(seconds(plan))


def in_loops(microbatches: int) -> Schedule:
    return Schedule(
        2,
        microbatches,
        w=lambda s, b, d: (s % 2, s % 2),
        n=lambda s, b, d: 100 * b + (s if str(d) == "F" else 50 - s),
    )


class Wide(nn.Module):
    """A chain where computing takes far longer than sending."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.mean()


@pytest.mark.slow
def test_the_planner_chooses_more_stages_where_they_fill_the_pipeline() -> None:
    few = fxsched.plan(Wide(8), in_loops(2), torch.ones(512, 512))
    many = fxsched.plan(Wide(8), in_loops(32), torch.ones(512, 512))
    assert len(few.stages) > 2 and len(few.stages) % 2 == 0
    assert len(many.stages) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "stages"), [(1, 1), (2, 8), (3, 8)])
def test_stages_that_w_does_not_look_at_are_several(workers: int, stages: int) -> None:
    schedule = schedules.ddp(workers, 6)
    plan = fxsched.plan(Wide(12), schedule, torch.ones(24, 512))
    assert len(plan.stages) == stages
    plan = fxsched.plan(Wide(12), schedules.fsdp(workers, 6), torch.ones(24, 512))
    assert len(plan.stages) == -(-stages // workers) * workers  # alike on each worker
    known = dict.fromkeys(range(workers), 0)  # priorities as a table
    schedule = replace(schedule, n=lambda s, b, d: known[s])
    plan = fxsched.plan(Wide(12), schedule, torch.ones(24, 512))
    assert len(plan.stages) == workers


def test_stages_of_sums_around_a_ring_are_large() -> None:
    """Of 12 MiB, a worker of 4 sends 1 MiB of each sum at a time."""
    network = Network([[0], [1], [2], [3]], Rate(1e9), Rate(25e6))
    schedule, x = schedules.ddp(4), torch.ones(24, 512)
    plan = fxsched.plan(Wide(12), schedule, x, network=network)
    assert len(plan.stages) == 3
    plan = fxsched.plan(Wide(12), schedule, x, network=network, sums="pieces")
    assert len(plan.stages) == 8


@pytest.mark.slow
def test_beside_global_batch_stages_there_are_as_many_others() -> None:
    layers = (nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8))
    model = nn.Sequential(*layers, nn.BatchNorm1d(256), nn.Linear(256, 1))
    open_, x = schedules.graph(2, 4), torch.randn(256, 256)
    asked = [
        fxsched.plan(model, replace(open_, stages=stages), x) for stages in (2, 4, 6, 8)
    ]
    steps = [each.simulate().latency for each in asked]
    plan = fxsched.plan(model, open_, x)
    assert plan.simulate().latency == min(steps) < 0.7 * steps[0]
    assert {place.compute for place in plan.placements.values()} == {0, 1}
    tight = fxsched.plan(model, open_, x, memory_limit=4.6e6)
    assert tight.simulate().latency > min(steps)  # which needs more than that
    assert len(fxsched.plan(model, schedules.ddp(2, 4), x).stages) == 8 + 1


class Written(nn.Module):
    """A chain, and a buffer written from the whole batch, which the loss may read."""

    def __init__(self, read: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(6))
        self.read = read
        self.register_buffer("largest", torch.zeros(512))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        with torch.no_grad():
            new = torch.maximum(self.largest * 0.9, x.amax(0))
            self.largest.copy_(new)
        return (x - new).pow(2).mean() if self.read else x.pow(2).mean()


@pytest.mark.parametrize("read", [False, True])
def test_explain_blames_a_global_batch_stage_that_others_wait_for(read: bool) -> None:
    schedule = fxsched.schedules.one_f_one_b(3, 4)
    text = fxsched.plan(Written(read), schedule, torch.randn(512, 512)).explain()
    limit = " ".join(text[text.index("what limits the step") :].split())
    assert "waiting for other stages" in limit or "unequal workers" in limit
    assert ("rows of the whole batch meet in" in limit) == read
    times = re.findall(r" (\d\S*) \+ (\d\S*) ", text)
    assert times and not any("e-" in each for pair in times for each in pair)


def test_explain_says_what_limits_the_step() -> None:
    text = fxsched.explain(Wide(8), schedules.gpipe(2, 1), torch.ones(512, 512))
    assert re.search(r"predicted step: .* (ms|µs), .*bubble \d+\.\d %", text)
    assert "what limits the step: waiting for other stages" in text
    assert re.search(
        r"^idle: unequal .* %, messages of activations \d+\.\d %$", text, re.M
    )
    assert re.search(r"^0 +layers\.0, .* 0 +\d+\.\d % .* MiB +1: 1\.0 MiB", text, re.M)


@pytest.mark.slow
def test_evaluation_is_cut_as_training_is() -> None:
    model, x = Wide(8), torch.ones(8, 512)
    trained = fxsched.plan(model, schedules.gpipe(2, 4), x)
    with torch.no_grad():
        evaluated = fxsched.plan(model, schedules.gpipe(2, 4), x)
    assert modules(evaluated) == modules(trained)


def test_named_stages_go_with_a_schedule_that_fits_itself() -> None:
    plan = fxsched.plan(
        Towers(2, 2), schedules.graph(2, 4), rows(), rows(), stages=["head"]
    )
    assert modules(plan)[-1] == ["head"] and plan.schedule.fit is None


@pytest.mark.parametrize(
    "answer", [3, schedules.gpipe(4, 4), schedules.gpipe(2, 8), None]
)
def test_fit_must_return_a_schedule_of_the_same_size(answer: Any) -> None:
    schedule = Schedule(2, 4, fit=lambda stages: answer)
    with pytest.raises(PlanError, match=r"fit returned.*workers \(2\)"):
        fxsched.plan(Chain(4), schedule, rows())


def test_fit_must_be_a_function() -> None:
    with pytest.raises(PlanError, match=r"fit=3.*function of the stages"):
        Schedule(2, 4, fit=3)  # type: ignore[arg-type]


class Tabled(nn.Module):
    """An embedding table, a layer, and a table that a layer reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(50, 8), nn.Linear(8, 8)
        self.tied = nn.Embedding(50, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(self.table(x)) + self.tied(x)
        return nn.functional.linear(hidden, self.tied.weight).mean()


def test_hybrid_serves_the_stages_of_embedding_tables() -> None:
    """A table that other layers read has a dense gradient, and replicas."""
    schedule = schedules.hybrid(3, 4, servers=1)
    model, x = Tabled(), torch.arange(8).reshape(8, 1)
    plan = fxsched.plan(model, schedule, x, stages=["table", "layer", "tied"])
    owners = {
        state.name: group.owners for group in plan.groups for state in group.state
    }
    assert owners["table.weight"] == (2,)
    assert owners["layer.weight"] == owners["tied.weight"] == (0, 1)


class Early(nn.Module):
    """Rows meet after little of the work; there may be a mark further on."""

    def __init__(self, mark: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.mark = mark

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            if i == self.mark > 0:
                x = fxsched.stage_boundary(x)
            x = layer(x).tanh()
            if i == 0:
                x = x.cumsum(0)
        return x.mean()


def shares(plan: fxsched.Plan) -> list[list[str]]:
    """The modules of each worker, in order of the stages."""
    at = {str(job): place.compute for job, place in plan.placements.items()}
    found: list[list[str]] = [[], []]
    for s, data in plan.stages.nodes(data=True):
        if not data.get("joint"):
            found[at[f"{s}F0"]] += data["modules"]
    return found


@pytest.mark.parametrize("make", [schedules.gpipe, schedules.zb_h1])
def test_named_stages_start_there_after_rows_meet(make: Any) -> None:
    x = torch.randn(32, 64)
    first, second = shares(fxsched.plan(Early(), make(2, 4), x, stages=["layers.4"]))
    assert {"layers.1", "layers.3"} <= set(first) and second[0] == "layers.4"
    first, second = shares(fxsched.plan(Early(4), make(2, 4), x))
    assert "layers.3" in first and "layers.4" in second
    model = Early()
    plain = copy.deepcopy(model)
    backend = fxsched.backend(make(2, 4), stages=["layers.4"])
    torch.compile(model, backend=backend)(x).backward()
    plain(x).backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("make", [schedules.gpipe, schedules.one_f_one_b])
def test_work_after_rows_meet_is_shared_by_workers(make: Any) -> None:
    first, second = shares(fxsched.plan(Early(), make(2, 4), torch.randn(256, 64)))
    assert min(len(set(first)), len(set(second))) > 2


def test_where_rows_meet_finer_cuts_are_no_advice() -> None:
    x, schedule = torch.randn(64, 64), schedules.gpipe(2, 4)
    plan = fxsched.plan(Early(), schedule, x, stages=["layers.7"])
    text = " ".join(plan.explain().split())
    assert "before and after rows of the whole batch meet in 3*: name other" in text
    assert "cut finer" not in text
