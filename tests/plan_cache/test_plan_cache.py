"""What an earlier start planned is found again, and only for the same plan."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxsched
from fxsched import Direction, Placement, Schedule, planning, schedules
from fxsched.plan_cache import find, key
from fxsched.plan_cache.graph_files import packed, unpacked
from fxsched.plan_cache.names import CannotKeep

from ..cases import build
from ..devices import find_devices

Case = tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FXSCHED_CACHE", str(tmp_path / "plans"))
    monkeypatch.setattr(find, "WORTH", 0.0)
    return tmp_path / "plans"


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows with each microbatch that is traced."""
    done: list[None] = []
    trace = planning.trace_microbatch

    def counted(*args: Any, **options: Any) -> Any:
        done.append(None)
        return trace(*args, **options)

    monkeypatch.setattr(planning, "trace_microbatch", counted)
    return done


class Net(nn.Module):
    """Dropout, a norm that writes buffers, and labels of which some are ignored."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 8))
        )
        self.factor = factor

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scores = self.layers(x) * self.factor
        return nn.functional.cross_entropy(scores, labels)


def net(factor: float = 1.0, **options: Any) -> Case:
    torch.manual_seed(1)
    labels = torch.randint(8, (8,))
    labels[::3] = -100
    return Net(factor), (torch.randn(8, 8), labels), options


class Contrastive(nn.Module):
    """Rows that meet."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.one(x) @ self.other(y).T
        labels = torch.arange(len(logits))
        return nn.functional.cross_entropy(logits, labels)


def contrastive(**options: Any) -> Case:
    torch.manual_seed(1)
    return Contrastive(), (torch.randn(8, 8), torch.randn(8, 8)), options


def pooled() -> Case:
    """What torch.nn.functional dispatches by its arguments."""
    torch.manual_seed(1)
    layers = nn.Conv2d(1, 8, 3), nn.MaxPool2d(2), nn.AdaptiveMaxPool2d(1), nn.Flatten()
    model = Net()
    model.layers = nn.Sequential(*layers)
    return model, (torch.randn(8, 1, 8, 8), torch.arange(8)), {}


def named(name: str, **options: Any) -> Case:
    return (*build(name), options)


ROUNDED = {"activations": torch.bfloat16, "gradients": torch.int8}
CASES: dict[str, tuple[Callable[[], Case], Schedule]] = {
    "labels 1f1b": (net, schedules.one_f_one_b(2, 4)),
    "whole norms": (net, schedules.ddp(4)),
    "gpt split backward": (lambda: named("gpt"), schedules.zb_h1(2, 4)),
    "towers by their graph": (lambda: named("two_tower"), schedules.graph(3, 4)),
    "towers by auto": (lambda: named("two_tower"), schedules.auto(3, 4)),
    "rows that meet by auto": (lambda: contrastive(), schedules.auto(2, 4, True)),
    "auto in less": (lambda: named("gpt", memory_limit=4.6e5), schedules.auto(2, 4)),
    "unet recomputed": (lambda: named("unet", carry="recompute"), schedules.fsdp(4)),
    "experts looped": (lambda: named("experts"), schedules.lpp(4, 2, 4)),
    "joint": (lambda: contrastive(pairs="joint"), schedules.gpipe(2, 4)),
    "spread": (lambda: contrastive(pairs="spread"), schedules.ddp(4)),
    "deterministic": (lambda: net(deterministic=True), schedules.gpipe(2, 4)),
    "looked at": (lambda: net(check_finite=True), schedules.gpipe(2, 4)),
    "pooled": (pooled, schedules.one_f_one_b(2, 4)),
    "rounded": (
        lambda: net(encode={"activations": torch.bfloat16}),
        schedules.gpipe(2, 4),
    ),
}


def result(case: Case, schedule: Schedule) -> tuple[str, list[Tensor]]:
    """The plan, and what a step with gradients and one without give."""
    model, inputs, options = case
    backend = fxsched.backend(schedule, transport="threads", **options)
    step = torch.compile(model, backend=backend)
    torch.manual_seed(5)
    loss = step(*inputs)
    loss.backward()
    model.eval()
    with torch.no_grad():
        after = step(*inputs)
    assert backend.plan is not None
    values = [loss, after, *(p.grad for p in model.parameters()), *model.buffers()]
    text = f"{backend.plan}\n{backend.plan.digest}\n{backend.plan.text()}"
    torch._dynamo.reset()
    return text, [value.detach() for value in values if value is not None]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fxsched.RowsWarning")
@pytest.mark.parametrize("name", CASES)
def test_what_is_found_runs_as_what_was_made(name: str, traces: list[None]) -> None:
    make, schedule = CASES[name]
    first = result(make(), schedule)
    made = len(traces)
    second = result(make(), schedule)
    assert len(traces) == made > 0
    assert second[0] == first[0]
    torch.testing.assert_close(second[1], first[1], rtol=0, atol=0)


@pytest.mark.slow
def test_programs_with_the_optimizer_are_found(traces: list[None]) -> None:
    def losses() -> list[float]:
        model, inputs, _ = net()
        adam = torch.optim.Adam(model.parameters())
        backend = fxsched.backend(schedules.gpipe(2, 4), optimizer=adam)
        step = torch.compile(model, backend=backend)
        torch.manual_seed(5)
        found = [step(*inputs).item() for _ in range(3)]
        torch._dynamo.reset()
        return found

    first, made = losses(), len(traces)
    assert losses() == first
    assert len(traces) == made


def shifted(by: int, order: int = 1) -> Schedule:
    def w(s: int, b: int, d: Direction) -> Placement:
        return Placement((s + by) % 2, (s + by) % 2)

    return Schedule(2, 4, 2, w, lambda s, b, d: order * b, name="mine")


def offering(by: int, order: int) -> Schedule:
    """A schedule with candidates, one of which is shifted."""
    candidates = schedules.gpipe(2, 4), shifted(by, order)
    return Schedule(2, 4, candidates=candidates, name="mine")


def table(*workers: int) -> Schedule:
    """A w that knows no more stages than these."""
    return Schedule(2, 4, None, lambda s, b, d: (workers[s],) * 2, name="mine")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: (net(), shifted(0)), lambda: (net(), shifted(1))),
        (lambda: (net(), shifted(0)), lambda: (net(), shifted(0, -1))),
        (lambda: (net(), table(0, 1)), lambda: (net(), table(0, 1, 0, 1))),
        (
            lambda: (net(batch_norm="microbatch"), schedules.gpipe(2, 4)),
            lambda: (
                net(batch_norm="microbatch"),
                replace(schedules.gpipe(2, 4), in_flight=1),
            ),
        ),
        (lambda: (net(), shifted(0)), lambda: (net(2.0), shifted(0))),
        (lambda: (net(), offering(0, 1)), lambda: (net(), offering(0, -1))),
        (
            lambda: (net(), shifted(0)),
            lambda: (net(carry="recompute"), shifted(0)),
        ),
    ],
    ids=["w", "n", "stages", "in_flight", "model", "candidate", "options"],
)
def test_what_differs_is_planned_anew(
    one: Callable[[], Any], other: Callable[[], Any], traces: list[None]
) -> None:
    result(*one())
    made = len(traces)
    result(*other())
    assert len(traces) == 2 * made
    result(*one())
    result(*other())
    assert len(traces) == 2 * made, "both are found now"


@pytest.mark.slow
def test_modes_are_part_of_a_plan(traces: list[None]) -> None:
    def call(dtype: torch.dtype | None) -> Tensor:
        model, inputs, _ = net()
        model.eval()
        step = torch.compile(model, backend=fxsched.backend(schedules.gpipe(2, 4)))
        with torch.autocast("cpu", dtype or torch.bfloat16, dtype is not None):
            loss = step(*inputs)
        torch._dynamo.reset()
        return loss.detach()

    plain = call(None)
    rounded = call(torch.bfloat16)
    assert len(traces) >= 2
    assert plain != rounded
    assert call(None) == plain
    assert call(torch.bfloat16) == rounded


def test_functions_of_the_users_own_are_planned_anew(
    place: Path, traces: list[None]
) -> None:
    @torch.library.custom_op("fxsched_tests::tripled", mutates_args=())
    def tripled(x: Tensor) -> Tensor:
        return 3 * x

    tripled.register_fake(torch.empty_like)

    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return tripled(super().forward(x).detach()).mean()

    case = Own(4, 4), (torch.ones(4, 4),), {"loss_reduction": "mean"}
    with torch.no_grad():
        for _ in range(2):
            model, inputs, options = case
            backend = fxsched.backend(schedules.ddp(2), **options)
            torch.compile(model, backend=backend)(*inputs)
            torch._dynamo.reset()
    assert len(traces) >= 2
    assert not list(place.glob("*"))


@pytest.mark.slow
def test_passes_of_the_users_own_are_planned_anew(place: Path) -> None:
    def nothing(program: Any, request: Any) -> Any:
        return program

    result(net(passes=[nothing]), schedules.gpipe(2, 4))
    assert not place.exists()


@pytest.mark.slow
def test_what_others_may_write_is_not_read(place: Path, traces: list[None]) -> None:
    result(net(), shifted(0))
    made = len(traces)
    place.chmod(0o777)
    result(net(), shifted(0))
    assert len(traces) == 2 * made
    place.chmod(0o700)
    for file in place.iterdir():
        file.chmod(0o666)
    result(net(), shifted(0))
    assert len(traces) == 3 * made


@pytest.mark.slow
def test_a_file_that_was_cut_short_is_made_anew(
    place: Path, traces: list[None]
) -> None:
    wanted = result(net(), shifted(0))
    made = len(traces)
    for file in place.iterdir():
        file.write_bytes(file.read_bytes()[:-9])
    assert result(net(), shifted(0))[0] == wanted[0]
    assert len(traces) == 2 * made
    result(net(), shifted(0))
    assert len(traces) == 2 * made


def test_constants_are_what_they_were() -> None:
    for value in (
        torch.tensor(True),
        torch.arange(6.0, dtype=torch.bfloat16).view(2, 3).T,
        torch.empty(0, 3, dtype=torch.int64),
        torch.tensor([1 + 2j]),
    ):
        found = unpacked(packed((value, value)), {})
        assert found[0] is found[1] and torch.equal(found[0], value)
        assert found[0].dtype == value.dtype


def test_long_names_of_nodes_are_what_they_were() -> None:
    graph, name = fx.Graph(), "a_name_of_more_characters_than_are_written_in_place"
    graph.output(graph.placeholder(name))
    found = unpacked(packed(graph), {})
    assert [node.target for node in found.nodes] == [name, "output"]


OWN_CLASS = ["class", "fxsched.ir.early.Early"]
ATTACKS = {  # a value of a plan, that would run code if it were let to
    "function": ["f", "os.system"],
    "getter": ["f", "operator.attrgetter"],
    "own function": ["f", "fxsched.cli.user_file.from_file"],
    "private": ["f", "fxsched.ir.ops._anything"],
    "operation": ["op", "mylib::run.default"],
    "class": ["data", "subprocess.Popen", {"args": ["l", "touch", "x"]}],
    "own class": ["data", "fxsched.cli.user_file.UserFile", {"path": "x"}],
    "code in a name": ["graph", [["placeholder", "x=print('ran')", "x"]]],
    "code in a module's name": ["graph", [["call_module", "a'); print('ran')", "a"]]],
    "code in a node's name": ["graph", [["output", "output", "o; print('ran')"]]],
    "a method": ["graph", [["call_method", "__class__.__subclasses__", "x"]]],
    "no operation": ["op", "aten::__getattr__.__func__"],
    "a call of a class": ["graph", [["call_function", OWN_CLASS, "x"]]],
    "a torch function": ["torch", "load"],
    "another format": None,
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_file_names_only_what_is_listed(name: str) -> None:
    entry: Any = ATTACKS[name]
    inside = ["torch", "load"] if name == "a torch function" else ["#", 0]
    table = [] if entry is None or entry[0] == "torch" else [entry]
    body = {"format": 0 if entry is None else 1, "table": table, "value": inside}
    with pytest.raises(CannotKeep):
        unpacked(json.dumps(body), {})


@pytest.mark.parametrize("op", ["call_module", "get_attr"])
@pytest.mark.parametrize("inside", [{}, {"to_folder": ["class", OWN_CLASS[1]]}])
def test_a_graph_reads_only_parts_of_its_own(op: str, inside: Any) -> None:
    graph = ["graph", [[op, "to_folder", "to_folder"]]]
    table = [graph, ["module", 0, "Stage", inside, {}]]
    body = {"format": 1, "table": table, "value": ["#", 1]}
    with pytest.raises(CannotKeep):
        unpacked(json.dumps(body), {})


@pytest.mark.slow
def test_a_file_of_somebody_else_is_made_anew(place: Path, traces: list[None]) -> None:
    wanted = result(net(), shifted(0))
    made = len(traces)
    for file in place.iterdir():
        _, questions, body = file.read_text().split("\n")
        known = json.loads(body)
        known["table"].append(["f", "os.system"])
        text = f"{questions}\n{json.dumps(known)}"
        file.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
    assert result(net(), shifted(0))[0] == wanted[0]
    assert len(traces) == 2 * made


@pytest.mark.slow
def test_the_folder_keeps_the_plans_used_last(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.no_grad():
        plans = [fxsched.plan(net()[0], shifted(i), *net()[1]) for i in (0, 1)]
        assert plans[0].digest != plans[1].digest
        old, new = sorted(place.iterdir(), key=lambda file: file.stat().st_mtime_ns)
        os.utime(new, (1, 1))
        monkeypatch.setattr(
            "fxsched.plan_cache.folder.LARGEST", new.stat().st_size * 2.5
        )
        fxsched.plan(net()[0], shifted(0, -1), *net()[1])
    left = set(place.iterdir())
    assert old in left and new not in left and len(left) == 2


@pytest.mark.slow
def test_an_empty_variable_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXSCHED_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fxsched.plan(net()[0], shifted(0), *net()[1])
    assert not list(tmp_path.iterdir())
    monkeypatch.delenv("FXSCHED_CACHE")
    fxsched.plan(net()[0], shifted(0), *net()[1])
    assert len(list((tmp_path / "fxsched").iterdir())) == 1


START = """
import sys, torch, fxsched, fxsched.plan_cache.find as find
from tests.cases import build
find.WORTH = 0.0
model, inputs = build("gpt")
backend = fxsched.backend(fxsched.schedules.one_f_one_b(2, 4), transport="threads")
torch.compile(model, backend=backend)(*inputs).backward()
print(backend.plan.digest, sum(p.grad.abs().sum().item() for p in model.parameters()))
"""


@pytest.mark.slow
def test_another_process_finds_it(place: Path) -> None:
    def start(*more: str) -> str:
        code = "\n".join([*more, START])
        return subprocess.check_output([sys.executable, "-c", code], text=True)

    first = start()
    (file,) = place.iterdir()
    untraced = "import fxsched.planning; fxsched.planning.trace_microbatch = None"
    assert start(untraced) == first
    assert list(place.iterdir()) == [file]


@pytest.mark.slow
def test_two_processes_write_at_once(place: Path) -> None:
    command = [sys.executable, "-c", START]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    first, second = (each.communicate()[0] for each in both)
    assert first == second and first
    assert len(list(place.iterdir())) == 1
    untraced = "import fxsched.planning; fxsched.planning.trace_microbatch = None"
    code = f"{untraced}\n{START}"
    assert subprocess.check_output([sys.executable, "-c", code]) == first


def test_plans_of_other_devices_have_other_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Devices of any kind, with whatever their module tells of them."""
    make = key._installed.__wrapped__
    here = make()
    find_devices(monkeypatch, "xpu", 2)
    assert make() == (*here, "['the xpu 0', '0']", "['the xpu 1', '1']")
