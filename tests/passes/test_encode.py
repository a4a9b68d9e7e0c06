"""encode= equals eager PyTorch with casts where values go to other workers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import CheckError, PlanError, Schedule, ops, schedules
from tests.started_ranks import run_ranks

NARROW = torch.bfloat16
EDGES = {"activations": NARROW}
FORWARD, BACKWARD = {"forward"}, {"backward"}
BOTH = FORWARD | BACKWARD


class Cast(torch.autograd.Function):
    """An edge between stages, cast on its way in some directions."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, directions: set[str]) -> Tensor:
        ctx.directions = directions
        return value.to(NARROW).float() if "forward" in directions else value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        narrow = "backward" in ctx.directions
        return gradient.to(NARROW).float() if narrow else gradient, None


class Skip(nn.Module):
    """Three layers, the third of which reads the first two; tanh keeps its result for
    B. Edges are cast as `casts` says. With a joint loss, rows meet in pairs."""

    def __init__(self, joint: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.casts: Mapping[str, set[str]] = {}
        self.joint = joint

    def edge(self, name: str, value: Tensor) -> Tensor:
        return Cast.apply(value, self.casts[name]) if name in self.casts else value

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.a(x))
        near = self.edge("near", first)
        second = torch.tanh(self.b(self.edge("ab", near)))
        third = self.c(self.edge("bc", second)) + self.edge("ac", near)
        if not self.joint:
            return third.pow(2).mean()
        return (third @ self.edge("far", first).T).logsumexp(1).mean()


def rows() -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


def skip(joint: bool = False) -> Skip:
    torch.manual_seed(0)
    return Skip(joint)


def placed(*workers: int, later: int = 0) -> Schedule:
    """Stages on these workers; B so many workers later."""
    count = max(workers) + 1

    def w(s: int, b: int, d: str) -> tuple[int, int]:
        moved = workers[s] + (later if d == "B" else 0)
        return workers[s], moved % count

    return Schedule(count, 2, len(workers), w=w, n=schedules.gpipe(count, 2).n)


EVERY = MappingProxyType({"ab": BOTH, "ac": BOTH, "bc": BOTH})


class Way(NamedTuple):
    """A schedule, and what its edges do."""

    schedule: Schedule
    options: Mapping[str, Any] = MappingProxyType({})
    casts: Mapping[str, set[str]] = EVERY


WAYS: dict[str, Callable[[], Way]] = {
    "gpipe": lambda: Way(schedules.gpipe(3, 2)),
    "1f1b, dynamic": lambda: Way(schedules.one_f_one_b(3, 2), {"order": "dynamic"}),
    "split backward": lambda: Way(schedules.zb_h1(3, 2)),
    "recompute": lambda: Way(schedules.gpipe(3, 2), {"carry": "recompute"}),
    "B elsewhere": lambda: Way(placed(0, 1, 2, later=1)),
    "recompute elsewhere": lambda: Way(
        placed(0, 1, 2, later=1), {"carry": "recompute", "order": "dynamic"}
    ),
    "two of three": lambda: Way(placed(0, 1, 1), {}, {"ab": BOTH, "ac": BOTH}),
    "there and back": lambda: Way(
        placed(0, 1, 0), {}, {"ab": BOTH, "bc": BOTH, "ac": FORWARD}
    ),
    "one worker": lambda: Way(schedules.ddp(2, 2), {}, {}),
}


def joint() -> Way:
    """The second stage and the global-batch one are on one worker, and read the
    first."""
    casts = {"near": BOTH, "far": BOTH}
    return Way(schedules.gpipe(2, 2), {"pairs": "joint"}, casts)


def eager(
    model: Skip, casts: Mapping[str, set[str]], parts: int
) -> tuple[Tensor, Skip]:
    """The loss and gradients of eager PyTorch with these casts."""
    model = copy.deepcopy(model)
    model.casts = casts
    losses = [model(part) / parts for part in rows().chunk(parts)]
    for loss in losses:
        loss.backward()
    return sum(losses[1:], losses[0]).detach(), model


def assert_equal_to_casts(
    model: Skip, way: Way, parts: int = 2, transport: Any = "threads"
) -> None:
    model.zero_grad()
    torch._dynamo.reset()
    loss, reference = eager(model, way.casts, parts)
    backend = fxsched.backend(
        way.schedule,
        ["b"] if model.joint else ["b", "c"],
        transport,
        encode=EDGES,
        **way.options,
    )
    with backend:
        found = torch.compile(model, backend=backend)(rows())
        found.backward()
    torch.testing.assert_close(found.detach(), loss, rtol=1e-6, atol=0)
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        if own.grad is not None:  # of this rank
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_it_is_eager_with_the_same_casts(name: str) -> None:
    assert_equal_to_casts(skip(), WAYS[name]())


@pytest.mark.slow
def test_rows_that_meet_are_eagers_with_the_same_casts() -> None:
    assert_equal_to_casts(skip(joint=True), joint(), parts=1)


def planned(model: nn.Module, *inputs: Tensor, **options: Any) -> fxsched.Plan:
    way = {"schedule": schedules.gpipe(3, 2), "stages": ["b", "c"], **options}
    return fxsched.plan(model, way.pop("schedule"), *inputs, **way)


def sent(plan: fxsched.Plan) -> list[str]:
    return [
        str(spec)
        for program in plan.programs
        for recv in program.graph.find_nodes(op="call_function", target=ops.recv)
        for spec in recv.meta["specs"]
    ]


@pytest.mark.slow
def test_bytes_are_of_that_type_wherever_they_are_told() -> None:
    plan, narrow = (planned(skip(), rows(), encode=e) for e in (None, EDGES))
    narrow.check()
    for edge in plan.stages.edges:
        wide, half = plan.stages.edges[edge], narrow.stages.edges[edge]
        assert half["bytes"] == wide["bytes"] / 2
        assert half["seconds"] < wide["seconds"]
    assert "2: 64 B" in narrow.explain() and "2: 128 B" in plan.explain()
    assert sorted(sent(narrow)) == ["bfloat16[4, 8]"] * 12 + ["float32[]"] * 2


class Kinds(nn.Module):
    """Values of all kinds go to the second stage; one of them goes to the user too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, told = self.a(x), torch.tanh(x @ self.a.weight)
        best, mask, half, size = h.argmax(1), h > 0, h.half() * 2, h.norm()
        h = torch.where(mask, self.b(h), half) + told
        return h.gather(1, best[:, None]).sum() * size, told


@pytest.mark.slow
def test_what_is_small_or_told_travels_as_it_is() -> None:
    options = {"stages": ["b"], "schedule": schedules.gpipe(2, 1)}
    kinds = set(sent(planned(Kinds(), rows(), encode=EDGES, **options)))
    forward = {"bfloat16[8, 8]", "int64[8]", "bool[8, 8]", "float16[8, 8]", "float32[]"}
    assert kinds == forward | {"float32[8, 8]"}


@pytest.mark.slow
def test_weights_and_their_gradients_stay_exact() -> None:
    for schedule in (schedules.fsdp(2), schedules.ddp(2)):
        options = {"schedule": schedule, "stages": "auto", "encode": EDGES}
        found = sent(planned(skip(), rows(), **options))
        assert "float32[8, 8]" in found and not any("bfloat16" in s for s in found)


@pytest.mark.slow
def test_both_ends_agree_on_the_type() -> None:
    plan = planned(skip(), rows(), encode=EDGES)
    wide = planned(skip(), rows())
    mixed = [*plan.programs[:2], wide.programs[2]]
    with pytest.raises(CheckError, match=r"sends float32.*expects bfloat16"):
        dataclasses.replace(plan, programs=mixed).check()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"encode": {"sums": torch.int8}}, r"{.sums.: torch.int8}\): give a dict"),
        ({"encode": torch.int8}, r"encode=torch.int8\): give a dict"),
        ({"encode": EDGES, "deterministic": True}, "rounds what goes from"),
    ],
)
def test_refusals(options: dict[str, Any], error: str) -> None:
    with pytest.raises(PlanError, match=error):
        fxsched.backend(schedules.gpipe(2, 2), **options)


@pytest.mark.slow
def test_ranks_are_eager_with_the_same_casts() -> None:
    done = run_ranks(2, "tests.ranks_encode").stdout
    assert done.count("casts are eager's") == 2, done
