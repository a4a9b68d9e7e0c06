"""Mistakes of users: each is one line that says what, where, and what to do."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fxsched
from fxsched import Plan, PlanError, Schedule, schedules
from fxsched.cli import main as cli

MODEL = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), torch.randn(8, 4)

def odd():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), torch.randn(7, 4)

def fails():
    raise RuntimeError("no data here")

def needs(x):
    return x

def number():
    return 3
"""
TWO = "--schedule gpipe --workers 2 --microbatches 4"

# Of the command line: what is typed after `fxsched`, and what stands in the line.
COMMANDS = [
    ("", r"Missing command; see .* --help"),
    ("simulat", r"No such command 'simulat'"),
    ("simulate", r"Missing option '--schedule'; see .* simulate --help"),
    ("simulate --schedule 1fb1", r"no schedule '1fb1'.*did you mean 1f1b\?"),
    ("simulate --schedule 1f1b --workers 0", r"'--workers': 0 is not in .* x>=1"),
    ("simulate --schedule 1f1b --workers 2.5", r"'2.5' is not a valid integer"),
    ("simulate --schedule 1f1b --forward nan", r"'--forward': nan is not finite"),
    ("simulate --schedule lpp --group-size 3", r"give --group-size 1, 2 or 4"),
    ("simulate --schedule 1f1b --group-size 2", r"doesn't take --group-size; it takes"),
    ("simulate --schedule 1f1b --zero 1", r"--zero needs --replicate"),
    ("simulate --schedule bad.json", r"bad.json is not JSON .* what Schedule.save"),
    ("simulate --schedule none.json", r"none.json can't be read: No such file"),
    ("simulate --schedule 1f1b --svg no/x.svg", r"'--svg': there is no folder 'no'"),
    ("simulate --schedule 1f1b --latency 1", r"--latency needs --bandwidth"),
    ("simulate --schedule 1f1b --fast", r"No such option '--fast'"),
    ("compare --schedules gpipe,nope", r"no schedule 'nope' \(choose from ddp"),
    ("search --save best.txt", r"'best.txt' must end with .json; give best.json"),
    ("plan", r"Missing argument 'MODEL'; see .* plan --help"),
    (
        f"plan none.py:make {TWO}",
        r"no file 'none.py'; give path/to/model.py:make; its folder has model.py",
    ),
    (f"plan none:make {TWO}", r"'none'; give path/to/model.py:make"),
    (f"plan model.py:mak {TWO}", r"has no function 'mak' .* did you mean make\?"),
    (f"plan model.py:fails {TWO}", r"model.py:12: fails\(\) raised .* no data here"),
    (f"plan model.py:needs {TWO}", r"without arguments: missing .* 'x'"),
    (f"plan model.py:number {TWO}", r"number\(\) returned int; return \(model, inputs"),
    (
        f"plan model.py:odd {TWO}",
        r"--microbatches 1\..*, --ragged fewer runs",
    ),
    (f"plan model.py:make {TWO} --modules head", r"'head', which .* did you mean 0"),
    (f"plan model.py:make {TWO} --rank 2", r"--rank 2: give a worker, 0\.\.1"),
    ("demo --learning-rate 0", r"'--learning-rate': 0.0 is not in the range x>0"),
    ("demo --learning-rate nan", r"'--learning-rate': nan is not finite"),
    ("blame model.py", r"'FOLDER': Directory 'model.py' is a file"),
]


@pytest.mark.parametrize(("typed", "said"), COMMANDS)
def test_a_misuse_of_the_command_line_is_one_line(
    typed: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    Path("bad.json").write_text('{"a": ')
    with pytest.raises(SystemExit) as stopped:
        cli.main(shlex.split(typed))
    printed = capsys.readouterr()
    assert stopped.value.code == 2 and printed.out == ""
    said_last = re.sub("fxsched: .* s so far\n", "", printed.err)  # on a busy machine
    assert re.fullmatch(rf"python -m fxsched.*: error: .*{said}.*\n", said_last)


class Loss(nn.Module):
    """Rows to a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: Any) -> Any:
        return self.net(x).square().mean()


class Rows(Loss):
    """Rows to rows."""

    def forward(self, x: Any) -> Any:
        return self.net(x)


X, PIPE = torch.ones(8, 4), schedules.gpipe(2, 4)
UPDATING = schedules.stale_by_one(2, 4)


def step(
    x: Any = X, model: nn.Module | None = None, schedule: Any = PIPE, **options: Any
) -> Any:
    """What a compiled model returns."""
    backend = fxsched.backend(schedule, **options)
    return torch.compile(model or Loss(), backend=backend)(x)


def placed(**fields: Any) -> Plan:
    """A plan by a w and n of a user's."""
    usual = {"w": lambda s, b, d: (s % 2, s % 2), "n": lambda s, b, d: b}
    schedule = Schedule(workers=2, microbatches=4, stages=2, **usual | fields)
    return fxsched.plan(Loss(), schedule, X)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@cache
def plan() -> Plan:
    return fxsched.plan(Loss(), PIPE, X)


def closed(model: nn.Module, before: bool) -> None:
    """Closes a backend before a call, or between a call and its backward."""
    backend = fxsched.backend(PIPE)
    compiled = torch.compile(model, backend=backend)
    out = compiled(X)
    backend.close()
    if before:
        compiled(X)
    out.mean().backward()


def twice(out: Tensor) -> None:
    out.backward()
    out.backward()


def two_models() -> None:
    model = Loss()
    backend = fxsched.backend(PIPE, optimizer=sgd(model))
    for each in (model, Loss()):
        torch.compile(each, backend=backend)(X)


def some_parameters() -> None:
    model = Loss()
    step(model=model, optimizer=sgd(model.net[0]))


# Of the API: a name, a call, and how its error begins and goes on. Those with TypeError
# are Python's own words for a function's arguments.
CALLS: list[tuple[str, Callable[[], Any], str]] = [
    (
        "a name for a schedule",
        lambda: step(schedule="1f1b"),
        r"backend\(schedule='1f1b'\): give a Schedule, such as .*one_f_one_b\(\.\.\)",
    ),
    (
        "a constructor for a schedule",
        lambda: step(schedule=schedules.gpipe),
        r"backend\(schedule=<function gpipe .*>\): give a Schedule, such as",
    ),
    (
        "model and schedule in the other order",
        lambda: fxsched.compile(PIPE, Loss()),
        r"compile\(schedule=a Loss\): give a Schedule",
    ),
    (
        "inputs before the schedule",
        lambda: fxsched.explain(Loss(), X, PIPE),
        r"plan\(schedule=a Tensor\): give a Schedule",
    ),
    (
        "a schedule before the model",
        lambda: fxsched.plan(PIPE, Loss(), X),
        r"the model comes first, here is a Schedule",
    ),
    (
        "a class for a model",
        lambda: fxsched.plan(Loss, PIPE, X),
        r"plan\(model=Loss\): give a model, Loss\(...\), not its class",
    ),
    (
        "a schedule for a backend",
        lambda: torch.compile(Loss(), backend=PIPE)(X),
        r"was given a Schedule.*give torch.compile\(model, backend=fxsched.backend\(",
    ),
    (
        "a backend that was not called",
        lambda: torch.compile(Loss(), backend=fxsched.backend)(X),
        r"names the function; give what it makes, torch.compile\(model, backend=",
    ),
    (
        "options of Inductor",
        lambda: torch.compile(Loss(), backend=fxsched.backend(PIPE), mode="default2")(
            X
        ),
        r"mode='default2'\) is for Inductor; leave it out",
    ),
    (
        "an unknown transport",
        lambda: step(transport="mpi"),
        r"backend\(transport='mpi'\): give 'threads', 'distributed'",
    ),
    (
        "NCCL without torchrun",
        lambda: step(transport="nccl"),
        r"transport='nccl' needs a process group: start with torchrun",
    ),
    (
        "graphs of the CPU",
        lambda: step(capture="graphs"),
        r"the model's tensors are on the CPU, which has no graphs; move .* to a GPU",
    ),
    (
        "ranks without torchrun",
        lambda: step(transport="distributed"),
        r"needs a process group: start with torchrun --nproc-per-node 2",
    ),
    (
        "a text for bytes",
        lambda: step(memory_limit="1GB"),
        r"backend\(memory_limit='1GB'\): give bytes, above 0",
    ),
    (
        "a function for passes",
        lambda: step(passes=len),
        r"backend\(passes=<built-in function len>\): give a list of functions",
    ),
    (
        "a class for an optimizer",
        lambda: step(optimizer=torch.optim.SGD),
        r"give the torch.optim.Optimizer of the model's parameters",
    ),
    (
        "a text for a type",
        lambda: step(gradient_dtype="float32"),
        r"gradient_dtype='float32'\): give one of torch.float32",
    ),
    (
        "one name for stages",
        lambda: step(stages="net"),
        r"backend\(stages='net'\): give 'auto' or a list of module names",
    ),
    (
        "stages that there aren't",
        lambda: step(stages=["nett"]),
        r"'nett', which the model doesn't call; did you mean net",
    ),
    (
        "more stages than the schedule has",
        lambda: step(stages=["net.0", "net.1", "net.2"]),
        r"makes 3 stages, but the schedule has 2; name as many",
    ),
    (
        "an argument that there isn't",
        lambda: step(batch_dims={"y": 1}),
        r"called without 'y'; its arguments are x",
    ),
    (
        "a dimension that there isn't",
        lambda: step(batch_dims={"x": 5}),
        r"x has no dimension 5; its shape is \[8, 4\]",
    ),
    (
        "a batch that doesn't divide",
        lambda: step(X[:7]),
        r"x has a batch of 7, which does not divide into 4 microbatches; pass a mul",
    ),
    (
        "an empty batch",
        lambda: step(X[:0]),
        r"x has a batch of 0, which does not divide into 4",
    ),
    (
        "a list for a batch",
        lambda: step([1.0, 2.0]),
        r"no tensor input to cut into 4 microbatches; pass it the batch",
    ),
    (
        "a model without memory",
        lambda: step(X.to("meta"), Loss().to("meta")),
        r"on the meta device.*fxsched.plan plans it as it is, and model.to_empty",
    ),
    (
        "an option that there isn't",
        lambda: fxsched.plan(Loss(), PIPE, X, stagess=[]),
        r"plan\(stagess=\): neither an option of fxsched.plan.*did you mean stages=\?",
    ),
    (
        "an option that verify hasn't",
        lambda: fxsched.verify(Loss(), PIPE, X, z=1),
        r"verify\(z=\): neither an option of fxsched.verify nor .*; leave it out",
    ),
    (
        "a number for a loss",
        lambda: fxsched.verify(Loss(), PIPE, X, loss=3),
        r"verify\(loss=3\): give a function of what the model returns, or None",
    ),
    (
        "a w of a text",
        lambda: placed(w=lambda s, b, d: "0"),
        r"w\(0F0\) returned '0'; return Placement\(weights, compute\)",
    ),
    (
        "a w beside the workers",
        lambda: placed(w=lambda s, b, d: (5, 5)),
        r"puts its weights on worker 5, but workers are 0\.\.1",
    ),
    (
        "a w that raises",
        lambda: placed(w=lambda s, b, d: [][s]),
        r"w\(0F0\) raised IndexError: list index out of range at .*test_misuse.py",
    ),
    (
        "a w of two arguments",
        lambda: placed(w=lambda s, b: 0),
        r"w\(0F0\) raised TypeError.*test_misuse\.py:\d+; it is called with \(stage,",
    ),
    (
        "an n of a float",
        lambda: placed(n=lambda s, b, d: 1.5),
        r"n\(0F0\) returned 1.5; return an int",
    ),
    (
        "an n of nothing",
        lambda: placed(n=lambda s, b, d: None),
        r"n\(0F0\) returned None; return an int",
    ),
    (
        "half a worker",
        lambda: schedules.gpipe(0.5, 4),
        r"gpipe\(workers=0.5\): give an int of 1 or more",
    ),
    (
        "groups that don't divide",
        lambda: schedules.lpp(4, 3, 8),
        r"lpp\(workers=4, group_size=3\): give group_size=1, 2 or 4, a divisor",
    ),
    (
        "an update every 3 of 4",
        lambda: placed(update_every=3),
        r"give an int of 1 or more that divides the 4 microbatches",
    ),
    (
        "updates without an optimizer",
        lambda: step(schedule=UPDATING),
        r"give it the optimizer, backend\(schedule, optimizer=optimizer\)",
    ),
    (
        "another model's optimizer",
        lambda: step(optimizer=sgd(Loss())),
        r"it has none of the model's parameters; give the one that was made for",
    ),
    (
        "an optimizer of some parameters",
        some_parameters,
        r"net.2.weight gets a gradient, but the optimizer doesn't have it; add it",
    ),
    (
        "one optimizer for two models",
        two_models,
        r"it has none of the model's parameters; give the one that was made for",
    ),
    (
        "an optimizer and no loss",
        lambda: step(model=(m := Rows()), optimizer=sgd(m)),
        r"one scalar loss, from which B starts; compute the loss in the model",
    ),
    (
        "a call after close()",
        lambda: closed(Loss(), True),
        r"this backend is closed; compile the model with a new one",
    ),
    (
        "close() before backward()",
        lambda: closed(Rows(), False),
        r"closed between the call and its backward\(\); close it after",
    ),
    (
        "backward() twice",
        lambda: twice(step()),
        r"backward\(\) a second time through one step; call the model again",
    ),
    (
        "backward() of an updated model",
        lambda: step(model=(m := Loss()), optimizer=sgd(m)).backward(),
        r"leave out backward\(\) and optimizer.step\(\)",
    ),
    (
        "a timeline that isn't kept",
        lambda: fxsched.backend(PIPE).timeline,
        r"there is no timeline; use backend\(schedule, profile=True\)",
    ),
    (
        "a worker that there isn't",
        lambda: plan().table(7),
        r"Plan.table\(rank=7\): give a worker, 0\.\.1",
    ),
    (
        "a number for a timeline",
        lambda: plan().compare(3),
        r"Plan.compare\(3\): give backend.timeline",
    ),
    (
        "a picture of no width",
        lambda: plan().diagram().text(width=0),
        r"Diagram.text\(width=0\): give an int of 1 or more, or None",
    ),
    (
        "a picture of an unknown kind",
        lambda: plan().diagram().save("step.png"),
        r"save\('step.png'\): give a name that ends with .svg, .html, .txt",
    ),
    (
        "a checkpoint over a file",
        lambda: fxsched.save(__file__, Loss()),
        r"test_misuse.py'\): this is a file; give a folder",
    ),
    (
        "weights over a file",
        lambda: fxsched.save_weights(__file__, Loss()),
        r"save_weights\('.*test_misuse.py'\): this is a file; give a folder",
    ),
    (
        "a checkpoint out of a file",
        lambda: fxsched.load(__file__, Loss()),
        r"load\('.*test_misuse.py'\): this is a file; give a folder",
    ),
    (
        "a checkpoint that there isn't",
        lambda: fxsched.load("nothing", Loss()),
        r"this folder has no file 'latest'.*give the folder that fxsched.save was",
    ),
    (
        "a model before the folder",
        lambda: fxsched.save(Loss(), "folder"),
        r"save\(folder=a Loss\): give a folder's path, then the model",
    ),
    (
        "extra= without names",
        lambda: fxsched.save("folder", Loss(), extra=3),
        r"extra=3: give a dict by name, as \{'scheduler': scheduler\}",
    ),
    (
        "the norm of a number",
        lambda: fxsched.clip_grad_norm_(3, 1.0),
        r"clip_grad_norm_\(3, max_norm\): give the model, or parameters",
    ),
    (
        "the state of a number",
        lambda: fxsched.full_state_dict(3),
        r"no state of a int; give the model, a torch.nn.Module, compiled or not",
    ),
    (
        "a boundary of a number",
        lambda: fxsched.stage_boundary(3),
        r"stage_boundary\(3\): give a tensor",
    ),
    (
        "rows of a batch that doesn't divide",
        lambda: PIPE.local_rows(0, 7),
        r"local_rows\(batch=7\): give a multiple of the 4 microbatches",
    ),
    (
        "times that aren't numbers",
        lambda: fxsched.simulate(PIPE, durations=[1, 2]),
        r"simulate\(durations=\[1, 2\]\): give times of F and B, as",
    ),
]


@pytest.mark.parametrize(
    ("call", "said"), [case[1:] for case in CALLS], ids=[case[0] for case in CALLS]
)
def test_a_misuse_of_the_api_is_one_line(
    call: Callable[[], Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((PlanError, RuntimeError), match=said) as raised:
        call()
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"orders": "static"}, "did you mean order="),
        ({"recompute": True}, "did you mean carry='recompute'"),
        ({"workers": 2}, r"workers= is an argument of a schedule, such as fxsched\."),
        ({"speed": 1}, "its options are stages, transport, order,"),
    ],
)
def test_an_option_that_there_is_not_is_an_error(
    given: dict[str, Any], said: str
) -> None:
    (name,) = given
    with pytest.raises(TypeError, match=rf"backend\(\) got .*'{name}'; {said}"):
        fxsched.backend(schedules.gpipe(2, 4), **given)
    with pytest.raises(TypeError, match=rf"compile\(\) got .*'{name}'; {said}"):
        fxsched.compile(Loss(), schedules.gpipe(2, 4), **given)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: schedules.lpp(4, 2),
            "lpp(4, 2): missing a required argument: 'microbatches'; it takes workers, "
            "group_size, microbatches, stages=None",
        ),
        (
            lambda: schedules.lpp(4, 8, group_size=2),
            "lpp(4, 8, group_size=2): group_size is given twice, by place and by name; "
            "it takes workers, group_size, microbatches, stages=None",
        ),
        (
            lambda: schedules.lpp(4, 8, groupsize=2),
            "lpp(4, 8, groupsize=2): there is no argument 'groupsize', did you mean "
            "group_size=?; it takes workers, group_size, microbatches, stages=None",
        ),
        (
            lambda: schedules.gpipe(2, 4, 8),
            "gpipe(2, 4, 8): too many positional arguments; it takes workers, "
            "microbatches",
        ),
        (
            lambda: schedules.sharded(schedules.gpipe(2, 4)),
            "sharded(a Schedule): missing a required argument: 'shards'; it takes "
            "schedule, shards",
        ),
    ],
)
def test_a_schedules_constructor_says_what_it_takes(
    make: Callable[[], Any], said: str
) -> None:
    with pytest.raises(TypeError) as raised:
        make()
    assert str(raised.value) == said


def test_a_name_that_is_near_is_in_pythons_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'bakend'") as raised:
        _ = fxsched.bakend
    assert raised.value.name == "bakend" and raised.value.obj is fxsched


def test_a_dispatch_mode_around_the_call_is_refused() -> None:
    backend = fxsched.backend(schedules.gpipe(2, 4), transport="threads")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    step = torch.compile(model, backend=backend)
    message = "^FlopCounterMode is active around .* call the compiled model outside"
    for _ in range(2):
        with FlopCounterMode(display=False), pytest.raises(PlanError, match=message):
            step(torch.randn(8, 4))
        step(torch.randn(8, 4))
