"""deterministic=True: every schedule has the bits of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxsched
from fxsched import CheckError, Direction, Placement, PlanError, Schedule, schedules
from fxsched.ir import ops
from tests import bits
from tests.cases import anything
from tests.program_memory import most_held
from tests.started_ranks import run_ranks

WAYS = {
    "ddp": lambda: schedules.ddp(2, 4),
    "fsdp": lambda: schedules.fsdp(2, 4),
    "gpipe": lambda: schedules.gpipe(2, 4),
    "1f1b": lambda: schedules.one_f_one_b(2, 4),
    "zb_h1": lambda: schedules.zb_h1(2, 4),
    "anything": lambda: anything(5, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_threads_have_the_bits_of_one_process(way: str) -> None:
    order = "static" if way in ("ddp", "gpipe", "zb_h1") else "dynamic"
    model = {"ddp": "dropout", "anything": "mlp"}.get(way, "tied")
    stages = ["norm.0"] if way in ("ddp", "fsdp") else "auto"
    assert bits.compare(model, WAYS[way](), order=order, stages=stages)


@pytest.mark.slow
def test_a_loss_over_pairs_has_the_bits_of_one_worker() -> None:
    assert bits.compare("contrastive", schedules.zero2(2, 4))


@pytest.mark.slow
def test_ranks_have_the_bits_of_one_process() -> None:
    cases = ("--models", "chain", "--schedules", "1f1b")
    done = run_ranks(2, "tests.train_all", "--ranks", "2", "--bits", "0", *cases)
    assert "4 cases have the bits of one process, 0 were refused" in done.stdout


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x))).mean()


def last_first(s: int, b: int, d: Direction) -> int:
    """A worker that holds gradients until it is their turn."""
    return 100 - b if d is Direction.BACKWARD else b


BACKWARDS = Schedule(2, 4, 2, w=lambda s, b, d: Placement(s, s), n=last_first)


def test_out_of_order_gradients_wait_and_memory_counts_them() -> None:
    x = torch.randn(8, 3)
    plan = fxsched.plan(Chain(), BACKWARDS, x, deterministic=True, stages=["b"])
    for worker, program in enumerate(plan.programs):
        held = most_held(program)["gradients"]
        whole = plan.memory[worker].each.weights  # of one stage
        assert held == plan.memory[worker].each.gradients == 3 * whole
    assert bits.compare("mlp", BACKWARDS)


@pytest.mark.slow
def test_the_check_finds_two_additions_in_another_order() -> None:
    plan = fxsched.plan(
        Chain(), schedules.ddp(2, 4), torch.randn(8, 3), deterministic=True
    )
    plan.check()
    program = plan.programs[0]
    adds = program.graph.find_nodes(op="call_function", target=ops.reduce)
    second, third = adds[1:3]
    assert second.args[1] is adds[0] and third.args[1] is second
    one, other = second.args[2], third.args[2]
    assert isinstance(one, fx.Node) and isinstance(other, fx.Node)
    where = {node: i for i, node in enumerate(program.graph.nodes)}
    later = max(one, other, key=where.__getitem__)
    later.append(second)
    second.append(third)
    frees = program.graph.find_nodes(op="call_function", target=ops.free)
    moved = [one, other, adds[0], second]
    for free in frees:
        free.args = tuple(each for each in free.args if each not in moved)
    frees[-1].args = (*frees[-1].args, *moved)
    second.args, third.args = (0, adds[0], other), (0, second, one)
    with pytest.raises(
        CheckError, match=r"the gradient of group 0 adds up .*; it should be"
    ):
        plan.check()


def refused(message: str, **options: object) -> None:
    with pytest.raises(PlanError, match=message):
        fxsched.backend(schedules.gpipe(2, 4), deterministic=True, **options)


def test_what_is_not_deterministic_is_refused() -> None:
    refused("inductor", stage_compiler="inductor")
    refused("pairs='spread' adds up gradients of embeddings by rows", pairs="spread")
    with pytest.raises(PlanError, match="give True or False"):
        fxsched.backend(schedules.gpipe(2, 4), deterministic="yes")
    with pytest.raises(PlanError, match="average_every"):
        fxsched.backend(schedules.local_sgd(2, 4), deterministic=True)
    late = schedules.parameter_server(3, microbatches=4, asynchronous=True, staleness=1)
    with pytest.raises(PlanError, match="order of arrival"):
        fxsched.backend(late, deterministic=True, order="dynamic")


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.a(x)).pow(2).mean()


def test_buffers_that_several_workers_write_are_refused() -> None:
    x = torch.randn(8, 3)
    with pytest.raises(PlanError, match="several workers run it, where one process"):
        options = {"deterministic": True, "batch_norm": "microbatch"}
        fxsched.plan(Statistics(), schedules.ddp(2, 4), x, **options)


class Attention(nn.Module):
    """A block whose attention gives its input a transposed gradient, with batch_first
    and without."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=first)
        self.feed = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x) if self.attention.batch_first else self.norm(x).transpose(0, 1)
        y, _ = self.attention(y, y, y, need_weights=False)
        x = x + (y if self.attention.batch_first else y.transpose(0, 1))
        return x + self.feed(x)


class Mixed(nn.Module):
    """Transposed values, and a mean that repeats its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(32, 24), nn.Linear(24, 32)
        self.rows = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for rows in self.rows:
            x = x + rows(torch.tanh(x).mT).mT
        return self.out(x).mean(1, keepdim=True)


class Convolved(nn.Module):
    """Normalizations that get transposed gradients, and give contiguous ones."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm = nn.Conv1d(32, 32, 4, 2, 1), nn.GroupNorm(4, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
        self.up = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.silu(self.norm(self.down(x.mT)))
        return self.up(self.layer(x.mT).mT).mT


def with_head(*blocks: nn.Module) -> nn.Module:
    return Squared(nn.Sequential(nn.Linear(8, 32), *blocks, nn.Linear(32, 3)))


class Squared(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean()


LAYOUTS = {
    "batch first": lambda: with_head(Attention(True), Attention(True)),
    "batch second": lambda: with_head(Attention(False), Attention(False)),
    "mixed": lambda: with_head(Mixed()),
    "convolved": lambda: with_head(Convolved()),
}


@pytest.mark.slow
@pytest.mark.parametrize("model", LAYOUTS)
@pytest.mark.parametrize(
    "schedule",
    [
        schedules.one_f_one_b(2, 4),
        schedules.zb_h1(3, 4),
        schedules.gpipe(5, 1),
        schedules.gpipe(9, 4),
    ],
    ids=str,
)
def test_values_are_read_in_the_layout_of_one_process(
    model: str, schedule: Schedule
) -> None:
    """However the model is cut, its transposed values and gradients too."""
    torch.manual_seed(0)
    made, x = LAYOUTS[model](), torch.randn(8, 16, 8)
    found = bits.planned(made, schedule, (x,), transport="threads")
    for part in x.chunk(schedule.microbatches):
        (made(part) / schedule.microbatches).backward()
    for name, gradient in bits.gradients(made).items():
        assert torch.equal(found[name], gradient), name


class Skip(nn.Module):
    """A skip connection that is concatenated: its gradient has gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = nn.Linear(4, 4), nn.Linear(4, 4), Up()

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        return self.up(x, self.middle(x))


class Up(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y], 1).sin().mean()


def test_a_gradient_with_gaps_is_refused_with_its_modules() -> None:
    with pytest.raises(PlanError) as error:
        fxsched.plan(
            Skip(),
            schedules.gpipe(2, 4),
            torch.randn(8, 4),
            deterministic=True,
            stages=["up"],
        )
    said, line = str(error.value).split("\n")
    assert "gives the gradient of x_1 of down in a memory layout" in said
    assert said.endswith(
        "with stages=, or keep what makes and reads it together: "
        "same_stage=[['down', 'up']]"
    )
    assert "x = self.down(x)" in line


class Thrice(nn.Module):
    """A weight that the first of two stages reads twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        x = fxsched.stage_boundary(self.b(self.a(x)))
        return self.a(x).mean()


class Normalized(nn.Module):
    """A weight that each of two stages reads once; normalize's B adds to it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = fxsched.stage_boundary(x @ nn.functional.normalize(self.weight))
        return (x @ self.weight).tanh().mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Normalized(), r"stages 0, 1 make or read weight, and the sum"),
        (Thrice(), r"stages 0, 1 make or read a\.weight, and the sum"),
    ],
)
def test_sums_that_depend_on_the_cut_are_refused(
    model: nn.Module, message: str
) -> None:
    x = torch.randn(8, 4, 4)
    with pytest.raises(PlanError, match=message):
        fxsched.plan(model, schedules.gpipe(2, 4), x, deterministic=True)
    plan = fxsched.plan(copy.deepcopy(model), schedules.gpipe(2, 4), x)
    assert len(plan.stages) == 2


class Whole(nn.Module):
    """One module that reads its weight thrice, in a part that two stages share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.repeated = nn.Linear(4, 4), Repeated()

    def forward(self, x: Tensor) -> Tensor:
        return self.repeated(self.first(x)).square().mean()


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.move = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(8):
            x = (x @ self.move + self.move[0]).tanh()
        return x


def test_the_remedy_for_a_sum_in_two_stages_works() -> None:
    def planned(**options: Any) -> fxsched.Plan:
        pipeline, x = schedules.gpipe(2, 4), torch.randn(8, 4, 4)
        return fxsched.plan(Whole(), pipeline, x, deterministic=True, **options)

    with pytest.raises(
        PlanError, match=r"reads it together: same_stage=\[\['repeated'\]\]"
    ):
        planned()
    assert len(planned(same_stage=[["repeated"]]).stages) == 2
