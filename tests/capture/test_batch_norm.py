"""BatchNorm sees what eager PyTorch shows it, and what that costs."""

import copy

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, schedules


class Convs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()),
            *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False), nn.Flatten()),
            nn.Linear(16, 3),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.body(x), y)


class Rows(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 5), nn.BatchNorm1d(5, **options)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)).tanh()
        return nn.functional.cross_entropy(self.last(hidden), y)


class Halves(nn.Module):
    """A norm for each half of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.norms = nn.ModuleList(nn.BatchNorm1d(3) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden, half = self.layer(x), len(x) // 2
        halves = hidden[:half], hidden[half:]
        hidden = torch.cat(
            [norm(h) for norm, h in zip(self.norms, halves, strict=True)]
        )
        return nn.functional.cross_entropy(hidden, y)


def labels(size: int = 8) -> Tensor:
    return torch.randint(0, 3, (size,))


def trained(step, model: nn.Module, x: Tensor, y: Tensor) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = step(x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_as_eager(
    model: nn.Module, x: Tensor, schedule, far: float = 1e-9, **options
) -> None:
    model, y = model.to(x.dtype), labels(len(x))
    reference = copy.deepcopy(model)
    with fxsched.backend(schedule, **options) as backend:
        step = torch.compile(model, backend=backend)
        losses = trained(step, model, x, y)
        assert losses == pytest.approx(trained(reference, reference, x, y), rel=far)
        close = {"rtol": far, "atol": far / 100}
        mine, theirs = model.state_dict(), reference.state_dict()
        torch.testing.assert_close(mine, theirs, **close)
        grads = [[p.grad for p in m.parameters()] for m in (model, reference)]
        torch.testing.assert_close(*grads, **close)


@pytest.mark.slow
@pytest.mark.filterwarnings("error::fxsched.RowsWarning")
@pytest.mark.parametrize("name", ["gpipe", "ddp", "one_f_one_b"])
def test_convolutions_train_as_on_the_whole_batch(name) -> None:
    x = torch.randn(8, 2, 6, 6, dtype=torch.float64)
    assert_as_eager(Convs(), x, getattr(schedules, name)(2, 4))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"track_running_stats": False}])
def test_microbatches_of_one_row_train_as_on_the_whole_batch(options) -> None:
    x = torch.randn(4, 4, dtype=torch.float64)
    assert_as_eager(Rows(**options), x, schedules.gpipe(2, 4))


def test_evaluation_keeps_running_statistics() -> None:
    model, x, y = Rows().eval(), torch.randn(8, 4), labels()
    before = copy.deepcopy(model.state_dict())
    with fxsched.backend(schedules.gpipe(2, 4)) as backend:
        loss = torch.compile(model, backend=backend)(x, y)
    torch.testing.assert_close(loss, model(x, y))
    torch.testing.assert_close(model.state_dict(), before)


def refused(why: str, model: nn.Module, x: Tensor, **options) -> None:
    way = schedules.gpipe(2, 4)
    with pytest.raises(PlanError, match=why):
        fxsched.plan(model, way, x, labels(), **options)


@pytest.mark.slow
def test_half_precision_trains_as_on_the_whole_batch() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 4).bfloat16()
    assert_as_eager(Rows(), x, schedules.gpipe(2, 4), far=0.05)


def test_it_needs_exact_losses() -> None:
    with pytest.raises(PlanError, match='batch_norm="batch" runs'):
        fxsched.backend(
            schedules.gpipe(2, 4), batch_norm="batch", loss_reduction="mean"
        )


class Reads(Rows):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + self.norm.running_mean.sum()


@pytest.mark.slow
def test_running_statistics_may_be_read() -> None:
    x = torch.randn(8, 4, dtype=torch.float64)
    assert_as_eager(Reads(), x, schedules.gpipe(2, 4))


class Keeps(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.seen.mul_(0.9).add_(self.first(x).detach().mean(0))
        return super().forward(x, y)


@pytest.mark.slow
def test_a_model_may_keep_what_it_sees_besides() -> None:
    x = torch.randn(8, 4, dtype=torch.float64)
    assert_as_eager(Keeps(), x, schedules.gpipe(2, 4))


class Native(Rows):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        norm = torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)
        return super().forward(norm[0], y)


def test_a_batch_norm_of_another_name_is_refused() -> None:
    refused("doesn't recognise .* as a BatchNorm", Native(), torch.randn(8, 4))


class Broken(Rows):
    """Dynamo breaks its graph here, so that torch.export traces it."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x, y)


@pytest.mark.slow
def test_exported_models_train_as_on_the_whole_batch() -> None:
    model, x, y = Broken().double(), torch.randn(8, 4, dtype=torch.float64), labels()
    reference = copy.deepcopy(model)
    way = schedules.gpipe(2, 4)
    step = fxsched.compile(model, way)
    losses = trained(step, model, x, y)
    assert losses == pytest.approx(trained(reference, reference, x, y), rel=1e-9)
    torch.testing.assert_close(model.state_dict(), reference.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [schedules.one_f_one_b, schedules.ddp, schedules.fsdp])
def test_norms_of_halves_see_their_half_of_the_batch(kind) -> None:
    assert_as_eager(Halves(), torch.randn(8, 4, dtype=torch.float64), kind(2, 4))


class Towers(nn.Module):
    """A deep image tower with norms, a text tower without, a loss over all pairs."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            nn.Sequential(nn.Conv2d(4, 4, 3, 1, 1), nn.BatchNorm2d(4), nn.ReLU(True))
            for _ in range(9)
        ]
        self.image = nn.Sequential(nn.Conv2d(2, 4, 1), *layers, nn.Flatten())
        self.project = nn.Linear(144, 8)
        self.text = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        scores = self.project(self.image(x)) @ self.text(words).mT
        return nn.functional.cross_entropy(scores, torch.arange(len(x)))


def pictures() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 2, 6, 6), torch.randn(8, 256)


@pytest.mark.slow
@pytest.mark.parametrize("make", [schedules.one_f_one_b, schedules.graph])
def test_a_tower_with_norms_is_one_stage_beside_the_other_tower(make) -> None:
    plan = fxsched.plan(Towers(), make(2, 4), *pictures())
    joint = [s for s, data in plan.stages.nodes(data=True) if data.get("joint")]
    tower, _ = joint
    assert plan.stages.nodes[tower]["modules"][0].startswith("image")
    at = {str(job): place.compute for job, place in plan.placements.items()}
    texts = {at[f"{s}F0"] for s in plan.stages if s not in joint}
    assert texts == {1 - at[f"{tower}F*"]}
    text = " ".join(plan.explain().split())
    assert "BatchNorm makes global-batch stages (*), for statistics of" in text
    assert "; batch_norm='microbatch', or GroupNorm, avoid these stages" in text


@pytest.mark.slow
def test_lost_data_parallelism_is_said() -> None:
    x = torch.randn(8, 2, 6, 6)
    plan = fxsched.plan(Convs(), schedules.ddp(2, 4), x, labels(), deterministic=True)
    for text in (str(plan), plan.explain()):
        said = " ".join(text.split())
        assert " stages 0* (body), 1*: one job a direction" in said
        assert "where the rows of all microbatches meet; worker 1 runs none" in said
        assert "or GroupNorm, avoid these stages, and spread its rows over" in said
    assert "what limits the step: unequal workers; worker 0 runs stage 0* alone" in said
    assert "finer cuts don't divide it" in said and "cut finer" not in said


@pytest.mark.slow
def test_stages_may_be_named_where_all_rows_run() -> None:
    x = torch.randn(8, 2, 6, 6)
    plan = fxsched.plan(
        Convs(), schedules.gpipe(2, 4), x, labels(), stages=["body.3", "body.6"]
    )
    assert len(plan.stages) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"rows": "local"}, {"carry": "recompute"}, {"deterministic": True}]
)
def test_other_options_train_as_on_the_whole_batch(options) -> None:
    x = torch.randn(8, 2, 6, 6, dtype=torch.float64)
    assert_as_eager(Convs(), x, schedules.ddp(2, 4), **options)


def stale(name: str, model: nn.Module) -> tuple[Tensor, Tensor, fxsched.Plan]:
    """Losses of three steps with updates in the program, and of their replay."""
    batches = [(torch.randn(16, 4), labels(16)) for _ in range(3)]
    again = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    way = getattr(schedules, name)(2, 4)
    with fxsched.backend(way, optimizer=optimizer) as backend:
        step = torch.compile(model, backend=backend)
        losses = torch.stack([step(*batch).detach() for batch in batches])
        plan = backend.plan
    assert plan is not None
    other = torch.optim.SGD(again.parameters(), 0.1)
    return losses, torch.tensor(fxsched.replay(plan, again, other, batches)), plan


@pytest.mark.filterwarnings("error::fxsched.RowsWarning")
@pytest.mark.parametrize("name", ["pipedream", "pipemare", "local_sgd", "gpipe"])
def test_replays_see_the_batches_that_plans_do(name) -> None:
    losses, again, plan = stale(name, Rows())
    torch.testing.assert_close(losses, again)
    each = "each microbatch: each update is of a part of the batch"
    text = " ".join(plan.explain().split())
    assert (f"BatchNorm takes its statistics of {each}" in text) == (name != "gpipe")


def test_workers_that_wait_for_a_batch_norm_are_told_of_it() -> None:
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)]
    model = nn.Sequential(*blocks[:4], nn.BatchNorm1d(64), *blocks[4:])
    plan = fxsched.plan(model, schedules.zb_h1(4, 8), torch.randn(256, 64))
    text = " ".join(plan.explain().split())
    assert "BatchNorm makes global-batch stages (*), for statistics of" in text
    assert "in each step, since rows of the whole batch meet in 4*: " in text
    why = "plan.explain() says why workers are idle"
    assert plan.line.endswith(f"; rows of the whole batch meet in stage 4*; {why}")
    busy = fxsched.plan(model[:4], schedules.gpipe(2, 32), torch.randn(8192, 64)).line
    assert "explain" not in busy, "its bubble is small"
