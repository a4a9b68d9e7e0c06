"""The command line in process: what commands print, write and refuse."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fxsched import Network, Rate, schedules
from fxsched.cli import compare_plans
from fxsched.cli import main as cli
from fxsched.draw.whole_stages import MEET
from fxsched.schedules import LIBRARY, STALE
from fxsched.tuner import candidate_comparison

MODEL = """
import torch
from torch import nn


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, y):
        return (self.second(self.first(x).relu()) - y).square().mean()


class Narrow(nn.Module):
    def forward(self, x):
        y = x + 1
        return (y @ torch.ones(7, 7)).mean()


class Raises(nn.Module):
    def forward(self, x):
        raise RuntimeError("not today")


def make():
    return Chain(), (torch.randn(8, 4), torch.randn(8, 4))


def named():
    return Chain(), {"x": torch.randn(8, 4), "y": torch.randn(8, 4)}


def function():
    return lambda x: (x * 2).sum(), torch.randn(8, 4, requires_grad=True)


def narrow():
    return Narrow(), torch.randn(8, 4)


def raises():
    return Raises(), torch.randn(8, 4)


def no_input():
    return Chain(), ()


def three():
    return Chain(), torch.randn(8, 4), torch.randn(8, 4)


def four():
    return Chain(), torch.randn(8, 4), torch.randn(8, 4), None


def trained():
    model = Chain()
    inputs = torch.randn(8, 4), torch.randn(8, 4)
    return model, inputs, torch.optim.SGD(model.parameters())


def wrong():
    return *make(), torch.optim.SGD([torch.zeros(1, requires_grad=True)])


def tensor_first():
    return torch.randn(3), ()


def number():
    return Chain(), 3


def clash():
    return Chain(), {"stages": 3}


def takes(size):
    return make()


def fails():
    raise ValueError("no\\nluck")


def leaves():
    raise SystemExit("bye")


value = 3
chain = Chain()
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of model.py, from which commands are run."""
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "model", raising=False)  # of another test
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def output(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    cli.main(arguments.split())
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert all(line.endswith(" s so far") for line in lines), lines  # on a busy machine
    return printed.out


def refusal(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command ends with, after the name of the command."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments.split())
    printed = capsys.readouterr()
    assert stopped.value.code == 2
    assert printed.out == ""
    command = re.escape(" ".join(["python -m fxsched", *arguments.split()[:1]]))
    match = re.fullmatch(rf"{command}: error: (.+)\n", printed.err)
    assert match, printed.err
    return match[1]


def row(name: str, table: str) -> list[str]:
    found = re.findall(rf"^ *({re.escape(name)} .*)$", table, re.M)
    assert len(found) == 1, table
    return re.split(r"  +", found[0])


@pytest.mark.parametrize("command", ["", *cli.group.commands])
def test_help_says_what_is_taken(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output(f"{command} --help", capsys)
    assert text.startswith(f"Usage: python -m fxsched {command}".rstrip())
    if not command:
        assert all(f"  {name} " in text for name in cli.group.commands)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--carry recompute --prefetch 2 --deterministic", r"1f1b: 2 workers"),
        ("--modules second", r"\n *0 +first .*\n *1 +second "),
        ("--gradient-dtype float64 --encode activations=bfloat16", r"1f1b: 2 workers"),
        ("--batch-dims x=0,y=0 --ragged fewer", r"1f1b: 2 workers"),
        ("--device H100", r"\ncosts are estimates for device='H100'\n"),
    ],
)
def test_plan_takes_the_options_of_a_backend(
    options: str, says: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "plan model.py:make --schedule 1f1b --workers 2 --microbatches 2"
    assert re.search(says, output(f"{command} {options}", capsys))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            "--carry twice",
            "--carry twice: give 'auto', 'saved', 'recompute', a function",
        ),
        ("--prefetch 0.5", "'0.5' is not a valid int"),
        ("--encode sums=int8", "encode={'sums': torch.int8}"),
        (
            "--gradient-dtype wide",
            "'wide' is no torch.dtype; give one such as bfloat16",
        ),
        ("--outputs loss", "outputs"),
        ("--buffers a=,b=mean", "'a' has no word; give name=word,name=word"),
        ("--modules third", "^--modules names module 'third'"),
        ("--same-stage first+third", "^--same-stage names module 'third'"),
        ("--cut first=row", "the schedule has one shard"),
        ("--device K80", "'K80' is not one of 'cpu', 'A10', 'L4', 'A100', 'H100', "),
    ],
)
def test_plan_refuses_what_a_backend_does(
    options: str, says: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "plan model.py:make --schedule 1f1b --workers 2 --microbatches 2"
    assert re.search(says, refusal(f"{command} {options}", capsys))


def test_simulate_prints_the_step_and_a_small_diagram(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = output("simulate --schedule gpipe --workers 4 --microbatches 8", capsys)
    first = "gpipe: 4 workers, 8 microbatches, 4 stages: step 33, bubble 27.3 %"
    assert text.startswith(first)
    assert row("0, 3", text)[1:] == ["72.7 %", "8", "1", "0", "8", "8", "0"]
    assert re.search(r"^ +3 +\.{6}\S.*\.{12}$", text, re.M)
    large = "simulate --schedule gpipe --workers 4 --microbatches 80"
    said = " ".join(output(large, capsys).split())
    assert "shorter than a character: --text prints it, --html writes it. To" in said
    assert "To see each job, save it as .svg" in output(f"{large} --text", capsys)


@pytest.mark.parametrize(
    ("options", "step"),
    [
        ("1f1b --workers 4 --microbatches 8", 33),
        ("gpipe --workers 4 --microbatches 8 --transfer 1", 39),
        ("1f1b --workers 4 --microbatches 8 --replicate 2", 33),
        ("1f1b --workers 4 --microbatches 8 --forward 2 --backward 1", 33),
        ("gpipe --workers 2 --microbatches 1 --bandwidth 4 --message-bytes 2", 7),
        ("zb_h1 --workers 4 --microbatches 8 --backward 1 --weight 1", 27),
        ("ddp --workers 4 --microbatches 8 --stages 6", 36),
        ("fslpp --workers 4 --group-size 2 --microbatches 8 --even", 28),
        ("lpp --workers 64 --group-size 8 --stages 64 --microbatches 32", 201),
    ],
)
def test_simulate_takes_what_the_schedule_takes(
    options: str, step: float, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output(f"simulate --no-text --schedule {options}", capsys)
    assert f": step {step}, bubble" in text


def test_fetching_ahead_shortens_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    command = "simulate --schedule fsdp --bandwidth 1 --weight-bytes 1 --prefetch"
    steps = []
    for ahead in (0, 1):
        text = output(f"{command} {ahead}", capsys)
        steps.append(float(re.findall(r"step ([\d.]+),", text)[0]))
    assert steps[1] < steps[0]


def test_simulate_says_how_busy_links_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of many links, those of the busiest."""
    file, page = tmp_path / "net.json", tmp_path / "step.html"
    Network([[0], [1]], Rate(4.0), Rate(4.0)).save(file)
    command = "simulate --no-text --schedule gpipe --message-bytes 2 --workers"
    text = output(f"{command} 2 --network {file} --html {page}", capsys)
    assert re.search(r"^link +bytes +busy\n.*\nhost 0 out +8 B +12.5 %$", text, re.M)
    assert '<table id="network">' in page.read_text()
    text = output(f"{command} 16 --bandwidth 4 --html {page}", capsys)
    assert text.count("\nworker ") == 16
    assert "and 14 more" in text
    assert "the 16 busiest of 30 links" in page.read_text()


def test_pictures_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg, html, trace = (tmp_path / f"step.{kind}" for kind in ("svg", "html", "json"))
    command = "simulate --schedule 1f1b --workers 2 --microbatches 2 --no-text"
    text = output(f"{command} --svg {svg} --html {html} --trace {trace}", capsys)
    assert text.endswith(f"\nwrote {svg}\nwrote {html}\nwrote {trace}\n")
    assert "<svg" in svg.read_text()
    assert "<html" in html.read_text()
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 2 * 2 * 2


def test_a_picture_that_cannot_be_written_is_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["simulate", "--schedule", "gpipe", "--no-text", "--svg", "/dev/full"])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "error: --svg: /dev/full can't be written: No space" in said


def test_compare_sorts_by_step_and_says_why_some_are_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = output("compare --workers 4 --microbatches 8 --group-size 2", capsys)
    assert row("gpipe", text)[1:5] == ["4", "33", "27.3 %", "27.3 %"]
    assert row("* ddp", text)[1:3] == ["4", "24"]
    lines = text.split("\n\n")[1].splitlines()[2:]
    steps = [float(re.split(r"  +", line)[2]) for line in lines]
    apart = next(i for i, line in enumerate(lines) if line.startswith("* "))
    assert steps == sorted(steps[:apart]) + sorted(steps[apart:])
    assert all(line.startswith("* ") for line in lines[apart:])
    assert "\n\n* weights or gradients move, here in no time: ranked apart" in text
    assert max(map(len, lines)) <= 100
    assert "* sharded_parameter_server " in text  # names are whole
    alone = output("compare --workers 4 --microbatches 8", capsys)
    assert "not hsdp, sharded_groups, lpp, fslpp: needs --group-size" in alone
    left_out = re.findall(r"^not (\w+): (.*)$", text, re.M)
    assert len(lines) + len(left_out) == len(LIBRARY) - len(STALE)
    assert dict(left_out).keys() == {"parameter_server"}
    assert "microbatches=6" in dict(left_out)["parameter_server"]


@pytest.mark.parametrize("command", ["simulate --schedule zb_h1", "compare"])
def test_what_is_printed_fits_a_narrow_terminal(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    text = output(f"{command} --workers 4 --microbatches 8", capsys)
    assert max(map(len, text.splitlines())) <= 70


@pytest.mark.slow
def test_compare_plans_a_users_model(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = "--schedules gpipe,ddp,hsdp --workers 2"
    cli.main(f"compare {names} --model model.py:make".split())
    text = capsys.readouterr().out
    rows = re.findall(r"^(ddp|gpipe) +(\d+) +(\S+)", text, re.M)
    assert sorted(name for name, _, _ in rows) == ["ddp", "gpipe"]
    steps = [float(step) for _, _, step in rows]
    assert steps == sorted(steps)
    assert "not hsdp: needs --group-size" in text and "*" not in text


@pytest.mark.slow
def test_compare_lists_what_less_memory_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "long.py"
    file.write_text(
        "from tests.allocated import gpt\ndef make():\n    return gpt()\n", "utf-8"
    )
    chosen = "--schedules 1f1b --memory --workers 2"
    cli.main(f"compare {chosen} --model {file}:make".split())
    text = capsys.readouterr().out
    rows = re.findall(r"^1f1b +2 +(\S+) +\S+ % +(\S+) MiB", text, re.M)
    columns = zip(*rows, strict=True)
    steps, sizes = ([float(each) for each in column] for column in columns)
    assert len(rows) > 1 and steps == sorted(steps)
    assert sizes == sorted(sizes, reverse=True)
    assert "give --model too" in refusal("compare --memory", capsys)


@pytest.mark.slow
def test_compare_explains_the_stars_of_global_batch_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "norm.py"
    file.write_text(
        "import torch\nfrom torch import nn\n\n\ndef make():\n"
        "    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))\n"
        "    return model, (torch.randn(8, 4),)\n"
    )
    cli.main(f"compare --schedules gpipe --workers 2 --model {file}:make".split())
    compared = capsys.readouterr().out
    cli.main(f"search --workers 2 --effort 0.01 --model {file}:make".split())
    for text in (compared, capsys.readouterr().out):
        assert re.search(r"^gpipe +(1 \+ )?\d\* ", text, re.M)
        assert f"\n\n{MEET}" in text


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        ("make", " --microbatches 3", "has a batch of 8, which does not divide into 3"),
        ("narrow", "", "the model raised"),
    ],
)
def test_compare_refuses_a_model_before_it_plans_all_schedules(
    make: str,
    options: str,
    says: str,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compare_plans, "build_any", None)
    line = refusal(f"compare --model model.py:{make} --workers 2{options}", capsys)
    assert says in line and not line.startswith("not ")


def test_compare_and_search_rank_what_moves_weights_alike(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = "--workers 2 --microbatches 4 --transfer 0.1"
    for prefetch in ("", " --prefetch 1"):
        text = output(f"compare --schedules fsdp,gpipe {options}{prefetch}", capsys)
        compared = not re.search(r"^\* fsdp ", text, re.M)
        cli.main(f"search {options}{prefetch} --effort 0.01 --no-text".split())
        found = re.search(r"^fsdp .*$", capsys.readouterr().out, re.M)
        assert compared == bool(found) == bool(prefetch)
        if found:
            assert row("fsdp", text)[2] == re.split(r"  +", found[0])[2]


def test_compare_cuts_one_model_into_stages_of_each_schedules_size(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = output("compare --schedules 1f1b,folded,interleaved --workers 4", capsys)
    # the same 4 stages of work, as 4 stages and as 8 of half the size
    assert row("1f1b", text)[1:3] == ["4", "33"]
    assert row("interleaved", text)[1:3] == ["8", "28.5"]
    assert row("folded", text)[1] == "8"
    assert {row(name, text)[6] for name in ("1f1b", "interleaved", "folded")} == {"1"}


def test_search_prints_what_it_compared_and_the_best(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = "--workers 2 --microbatches 4 --backward 1 --weight 1 --effort 0.02"
    cli.main(f"search {options} --no-text".split())
    text = capsys.readouterr().out
    columns = r"^(\S+) .*?  (\d+) +([\d.]+) +[\d.]+ %"
    compared = re.findall(columns, text, re.M)
    steps = {name: float(step) for name, stages, step in compared if stages == "2"}
    assert steps["gpipe"] == steps["1f1b"] == 15
    least = min(float(step) for _, _, step in compared)
    best = re.findall(r" stages: step ([\d.]+), bubble", text)
    assert [float(step) for step in best] == [pytest.approx(least, abs=1e-3)]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["compare --schedules 1f1b,gpipe", "search"])
def test_fewer_microbatches_are_those_that_are_compared(
    command: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """4 divide the batch of 8, as 6 don't."""
    command += " --model model.py:make --workers 2 --microbatches 6"
    command += " --effort 0.01 --no-text" * command.startswith("search")
    says = refusal(command, capsys)
    assert "or take --microbatches 4" in says and "--ragged fewer runs it" in says
    text = output(f"{command} --ragged fewer", capsys)
    assert "2 workers, 4 microbatches" in text and "6 microbatches" not in text


@pytest.mark.slow
def test_a_schedule_of_a_file_is_changed_in_the_file(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedules.gpipe(2, 6).save("own.json")
    says = refusal("plan model.py:make --schedule own.json", capsys)
    assert "or take Schedule(microbatches=4)" in says and "--ragged fewer" in says


def test_importing_torch_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.say_import()
    assert capsys.readouterr().err == ""
    monkeypatch.delitem(sys.modules, "fxsched.planning")
    cli.say_import()
    assert capsys.readouterr().err == "fxsched: importing PyTorch\n"


@pytest.mark.slow
def test_search_for_a_model_ends_with_its_plan(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--workers 2 --microbatches 2 --effort 0.01 --html best.html"
    cli.main(f"search --model model.py:make {options}".split())
    text = capsys.readouterr().out
    assert "what limits the step" in text
    assert "<html" in (model / "best.html").read_text()


@pytest.mark.slow
def test_plan_without_a_schedule_is_what_is_recommended(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ["model.py:make", "--workers", "2", "--microbatches", "2"]
    cli.main(["recommend", *size])
    recommended = capsys.readouterr().out
    assert recommended.startswith("take ")
    assert "one process" in recommended and "what limits the step" in recommended
    cli.main(["plan", *size])
    text = capsys.readouterr().out
    assert text.startswith(recommended)
    assert "what limits the step" in text.removeprefix(recommended)
    line = refusal("plan model.py:make --group-size 2", capsys)
    assert "--group-size is an option of a schedule; give --schedule too" in line


@pytest.mark.slow
def test_search_compare_and_plan_predict_the_same(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step and its bytes, with updates, also where gradients are added up."""
    monkeypatch.setattr(candidate_comparison, "PLANNED", 99)
    size = "--workers 2 --microbatches 4 --device A10"
    names = ["1f1b", "zb_h1", "ddp", "fsdp"]
    file = "model.py:trained"
    options = f"{size} --schedules {','.join(names)}"
    cli.main(f"compare --model {file} {options}".split())
    table = capsys.readouterr().out
    cli.main(f"plan {file} {size} --no-text".split())
    searched = capsys.readouterr().out.partition("\n\nsearched")[0]
    unit = re.findall("step (ms|µs)", searched)[0]
    for name in names:
        _, stages, step, bubble, memory, *_ = row(name, table)
        assert row(name, searched)[1:5] == [stages, step, bubble, memory]
        text = output(f"plan {file} {size} --schedule {name}", capsys)
        assert f" {stages} stage" in text.partition("\n")[0]
        assert f"predicted step: {float(step):g} {unit}, " in text
        assert f"(bubble {bubble})" in text and f" {memory}\n" in text


@pytest.mark.parametrize("name", ["interleaved", "zb_v", "1f1b", "fsdp"])
def test_commands_agree_on_a_step(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Times are of the same model, however fine a schedule cuts it."""
    size = "--workers 4 --microbatches 8"
    table = output(f"compare {size}", capsys)
    found = row(name, table) if name != "fsdp" else row("* fsdp", table)
    text = output(f"simulate --schedule {name} {size} --no-text", capsys)
    assert f"step {found[2]}," in text
    halves = "the 8 stages here takes 0.5 of them" in " ".join(text.split())
    assert halves is (found[1] == "8")


def test_plan_prints_stages_workers_and_what_limits_the_step(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "plan model.py:make --schedule 1f1b --workers 2 --microbatches 2"
    text = output(f"{command} --svg step.svg", capsys)
    assert text.startswith("1f1b: 2 workers, 2 microbatches, 2 stages\n")
    assert re.search(r"^predicted step: \S+ (ms|µs)", text, re.M)
    assert "what limits the step" in text
    assert "<svg" in (model / "step.svg").read_text()


def test_plan_of_one_rank_by_names_of_modules(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "plan model:named --schedule gpipe --workers 2 --microbatches 2 --rank 1"
    text = output(f"{command} --modules second", capsys)
    assert text.startswith("worker 1\n")
    assert re.findall(r"^\d+ +(\d[FB]\d) ", text, re.M) == ["1F0", "1F1", "1B0", "1B1"]


def test_plan_prints_so_many_jobs_of_a_rank(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "plan model.py:function --schedule naive --workers 1 --rank 0 --jobs 1"
    assert output(command, capsys).splitlines()[-1].startswith("and ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "simulate --schedule gpipe --stage 2",
            r"No such option '--stage'. Did you mean '--stages' or '--state' or",
        ),
        (
            "search --workers 1000 --microbatches 1000",
            r"--workers 1000, --microbatches 1000: these make",
        ),
        (
            "search --workers 2 --memory-limit 0.1",
            r"--memory-limit 0.1: every schedule holds more",
        ),
        (
            "simulat",
            r"No such command 'simulat'\. Did you mean 'simulate'\?",
        ),
        ("simulate", r"Missing option '--schedule'; see .* simulate --help"),
        ("simulate --schedule gppe", r"'gppe' .*ddp, .*did you mean gpipe\?"),
        ("simulate --schedul gpipe", r".*'--schedul'\. .*'--schedule'.*"),
        ("simulate --schedule gpipe more", r".*unexpected extra argument \(more\)"),
        (
            "simulate --schedule gpipe --workers",
            r".*'--workers' requires an argument; see .*",
        ),
        (
            "simulate --schedule gpipe --workers ²",
            r"'--workers': '²' is not a valid integer",
        ),
        (
            "simulate --schedule gpipe --workers 9999999999",
            r"9999999999 stages \(or workers\) .*",
        ),
        (
            "simulate --schedule gpipe --forward nan",
            r"'--forward': nan is not finite",
        ),
        (
            "simulate --schedule gpipe --forward -1",
            r"'--forward': -1\.0 is not in the range x>=0",
        ),
        (
            "simulate --schedule gpipe --prefetch -1",
            r"'--prefetch': -1 is not in the range",
        ),
        (
            "simulate --schedule gpipe --group-size 2",
            r"gpipe doesn't take --group",
        ),
        (
            "simulate --schedule lpp",
            r"lpp needs --group-size; it takes --workers, ",
        ),
        ("simulate --schedule lpp --group-size 3", r"--workers 4, --group-size 3: "),
        ("simulate --schedule gpipe --stages 8", r"gpipe makes 4 stages for these wo"),
        (
            "simulate --schedule gpipe --svg /none/x.svg",
            r"'--svg': .* no folder '/none'",
        ),
        (
            "simulate --schedule gpipe --html /",
            r"'--html': '/' is a folder; give the na",
        ),
        ("simulate --schedule gpipe --latency 1", r"--latency needs --bandwidth"),
        ("simulate --schedule gpipe --bandwidth 0", r"--bandwidth 0 moves nothing"),
        (
            "simulate --schedule fsdp --prefetch 1",
            r"--prefetch needs --transfer, --bandwidth or --network",
        ),
        (
            "simulate --schedule gpipe --transfer 1 --bandwidth 1",
            r"--transfer and --bandwidth exclude each other",
        ),
        ("compare --schedules gpipe,1fb1", r"'1fb1' .*did you mean 1f1b\?"),
        ("compare --schedules gpipe --servers 2", r"none of these .* takes --servers"),
        (
            "compare --schedules ddp --workers 3 --microbatches 4",
            r"none of these schedules can be built: not ddp",
        ),
        ("compare --latency 1", r"--latency needs --bandwidth"),
        ("compare --model m.py:make --update 1", r"--update doesn't go with --model.*"),
        (
            "compare --workers 99999",
            r"99999 stages \(or workers\) of .* too many; give",
        ),
        ("compare --bandwidth 1 --weight-bytes 1", r"--weight-bytes needs --prefetch"),
        (
            "simulate --schedule gpipe --state 2",
            r"--state needs --weight-bytes.*give both",
        ),
        ("search --effort 0", r"--effort 0.0: give a number above 0"),
        (
            "search --objective spam",
            r"'--objective': 'spam' is not one of 'latency', 'span'",
        ),
        ("search --prefetch 1", r"--prefetch needs --transfer"),
        ("search --model a.py:b --forward 2", r"--forward doesn't go with --model"),
        ("search --model none.py:make", r"there is no file 'none.py'.*"),
        ("plan", r"Missing argument 'MODEL'; see .* plan --help"),
        (
            "simulate --schedule 1f1b --microbatches 4 --update-every 3",
            r"1f1b has 4 microbatches, not a multiple of --update-every 3; it takes ",
        ),
        (
            "simulate --schedule pipedream --microbatches 4 --update-every 2",
            r"pipedream has an update every 1 microbatches; it takes ",
        ),
        ("simulate --schedule 1f1b --update 1", r"no updates; give --update-every too"),
        ("simulate --schedule 1f1b --zero 1", r"--zero needs --replicate; it takes"),
        ("simulate --schedule 1f1b --shards 0", r"'--shards': 0 is not in the range"),
        ("simulate --schedule 1f1b --sums 2", r"--sums needs --shards, since"),
        (
            "simulate --schedule 1f1b --shards 2 --sum-bytes 1 --bandwidth 1",
            r"--sum-bytes needs --sums; give how many sums there are",
        ),
        (
            "simulate --schedule 1f1b --shards 2 --sums 1 --sum-bytes 1",
            r"--sum-bytes needs --bandwidth",
        ),
        ("simulate --schedule 1f1b --shards 9999999", r"are too many; give numbers"),
        ("compare --model m.py:make --sums 1", r"--sums doesn't go with --model.*"),
    ],
)
def test_a_wrong_option_is_one_line(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments.split())
    printed = capsys.readouterr()
    assert (stopped.value.code, printed.out) == (2, "")
    assert re.fullmatch(rf"python -m fxsched.*: error: .*{message}.*\n", printed.err)


def test_simulate_shows_what_workers_hold(capsys: pytest.CaptureFixture[str]) -> None:
    command = "simulate --schedule pipedream --workers 2 --microbatches 4 --no-text"
    sizes = "--weight-bytes 1024 --activation-bytes 512 --state 2"
    printed = output(f"{command} {sizes}", capsys)
    assert "worker    weights    versions    gradients    state    activ" in printed
    held = "0         1.0 KiB    1.0 KiB     1.0 KiB      2.0 KiB  512 B  "
    assert held in printed  # B of one of its two microbatches has let go of them


def test_updates_are_simulated_and_compared(capsys: pytest.CaptureFixture[str]) -> None:
    common = "--workers 2 --microbatches 4 --update-every 2 --update 0.5 --replicate 2"
    text = output(f"simulate --schedule 1f1b {common} --zero 1", capsys)
    assert re.search(r"returned +updates +renewed\n", text)
    rows = [line.split()[-3:] for line in text.splitlines()[4:8]]
    assert rows == [["0", "2", "0"]] * 2 + [["2", "0", "2"]] * 2
    names = "--schedules 1f1b,stale_by_one --workers 2 --microbatches 8"
    plain, often = (
        re.search(r"\n1f1b +2 +(\S+)", output(f"compare {names} {more}", capsys))
        for more in ("", "--update-every 2")
    )
    assert plain and often and float(plain[1]) < float(often[1])


@pytest.mark.slow
def test_shards_are_asked_for_wherever_a_schedule_is_named(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = "--workers 1 --microbatches 2 --shards 2"
    printed = output(f"plan model.py:make --schedule 1f1b {numbers} --no-text", capsys)
    assert printed.startswith("1f1b x 2 shards: 2 workers, 2 microbatches, 1 stage\n")
    assert "first.weight" in printed and "without shards, on 1 worker;" in printed
    command = f"compare --model model.py:make --schedules 1f1b,gpipe {numbers}"
    assert row("1f1b", output(command, capsys))[1] == "1"  # stages, not their pieces
    assert "no weight can be cut into 3 equal parts" in refusal(
        "plan model.py:make --schedule gpipe --workers 1 --shards 3", capsys
    )
    asked = "plan model.py:trained --schedule gpipe --workers 1 --shards 2"
    assert "updates every" in output(asked, capsys)
    schedules.one_f_one_b(2, 4).save("own.json")
    simulated = "--shards 2 --sums 2 --no-text"
    printed = output(f"simulate --schedule own.json {simulated}", capsys)
    assert "1f1b x 2 shards: 4 workers, 4 microbatches, 2 stages: step 7.5" in printed


def test_what_shards_hold_is_compared_in_stages(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = "compare --workers 2 --microbatches 4 --shards 2 --schedules 1f1b"
    printed = output(command, capsys)
    assert "2 workers, 4 microbatches, 2 shards, a model of 2 stages" in printed
    assert row("1f1b", printed)[-4:-2] == ["1", "0.5"]


def test_a_file_with_an_optimizer_plans_its_updates(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output("plan model.py:trained --schedule 1f1b --workers 2", capsys)
    assert "\n\nupdates every 4 microbatches; of stages on workers: 0 on 0" in text


def test_a_schedule_of_a_users_file(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "mine.py").write_text(
        "from fxsched import Schedule\n\ndef make():\n"
        "    return Schedule(workers=2, microbatches=2, name='mine',\n"
        "                    w=lambda s, b, d: (s % 2, s % 2), n=lambda s, b, d: b)\n"
        "\ndef same():\n    return make()\n"
        "\ndef name():\n    return '1f1b'\n"
    )
    assert "mine: 2 workers, 2 mic" in output(
        "simulate --schedule mine.py:make", capsys
    )
    assert "mine: 2 w" in output("plan model.py:make --schedule mine.py:make", capsys)
    both = "compare --schedule mine.py:make,mine.py:same --workers 2 --microbatches"
    twice = output(f"{both} 2", capsys)
    assert "mine " in twice and "mine.py:same " in twice  # none takes another's place
    assert output(f"{both} 2".replace(",", " --schedule "), capsys) == twice
    others = output(f"{both.replace('mine.py:same', 'ddp')} 4", capsys)
    assert "not mine: it has 2 microbatches, others 4; give --microbatches 2" in others
    for arguments, message in (
        (
            "mine.py",
            r"'mine.py': give path/to/schedule.py:make, a function of the file",
        ),
        (
            "mine.py:name",
            r"mine.py:name: name\(\) returned str; return a fxsched.Schedule",
        ),
        ("mine.py:mak", r"mine.py has no function 'mak' .*; did you mean make\?"),
        (
            "mine.py:make --workers 2",
            r"--schedule is from a file, .*; leave out --workers",
        ),
    ):
        said = refusal(f"simulate --schedule {arguments}", capsys)
        assert re.search(message, said), said


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("model", r"'model': give path/to/model.py:make or package.module:make"),
        (
            "mode.py:make",
            r"there is no file 'mode.py'; give path/to/model.py:make; did you mean mod",
        ),
        (
            "none.py:make",
            r"there is no file 'none.py'; give path/to/model.py:make; its folder has",
        ),
        ("none/model.py:make", r"there is no file .*: there is no folder '.*none'"),
        ("none.model:make", r"there is no module 'none.model' here, nor a Python file"),
        ("model.py:mak", r"model.py has no function 'mak' .*; did you mean make\?"),
        ("model.py:value", r"model.py has no function 'value' \(it has make, .*"),
        (
            "model.py:chain",
            r"model.py:chain: chain is of class Chain; name a function that returns",
        ),
        ("model.py:takes", r".*takes\(\) without arguments: .*'size'.*needs none"),
        ("model.py:fails", r"\S+model.py:\d+: fails\(\) raised ValueError: no luck"),
        ("model.py:leaves", r"\S+model.py:\d+: leaves\(\) raised SystemExit: bye"),
        ("model.py:three", r"three\(\) returned Tensor as the optimizer; return \(mo"),
        ("model.py:four", r"four\(\) returned tuple of 4; return \(model, inputs\)"),
        ("model.py:wrong", r".*optimizer=\): it has none of the model's parameters"),
        ("model.py:tensor_first", r".* returned Tensor as the model; return \(model"),
        ("model.py:number", r"number\(\) returned int as the inputs; return \(model"),
        (
            "model.py:clash",
            r".* 'stages', which is also the name of an argument of fxsched.plan",
        ),
        (
            "model.py:no_input",
            r"\S+model.py: the model raised TypeError: .* 'x' and",
        ),
        ("model.py:raises", r"\S+:23: the model raised .*RuntimeError"),
        ("model.py:narrow", r"\S+:18: the model raised RuntimeError: .*\[7, 7\]\."),
        ("model.py:make --workers 3", r".* batch of 8, which does not divide .*"),
        ("model.py:make --rank 4", r"--rank 4: give a worker, 0\.\.3"),
        ("model.py:make --modules none", r"--modules names module 'none', .*"),
        (
            "model.py:make --carry save",
            "--carry save: give 'auto', 'saved', 'recompute', a function.*",
        ),
        ("model.py:make --memory-limit 0", r".*give bytes, above 0"),
    ],
)
def test_a_model_that_cannot_be_planned_is_one_line(
    where: str, message: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(f"plan {where} --schedule ddp", capsys)
    assert re.match(message, said), said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def make(:", r"\S+broken.py:1: importing it raised SyntaxError: invalid syn"),
        ("\nimport none", r"\S+broken.py:2: importing it raised ModuleNotFoundError: "),
        ("exit(3)", r"\S+broken.py:1: importing it raised SystemExit: 3"),
        ("", r"broken.py has no function 'make' \(it has none\)"),
    ],
)
def test_a_file_that_cannot_be_imported_is_one_line(
    text: str, message: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "broken.py").write_text(text)
    assert re.match(message, refusal("plan broken.py:make --schedule ddp", capsys))


def test_a_file_may_be_named_like_a_library(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "torch.py").write_text("import torch\nfrom model import make")
    command = "plan torch.py:make --schedule gpipe --workers 2 --microbatches 2"
    assert output(f"{command} --rank 0", capsys).startswith("worker 0\n")


def test_an_interrupt_ends_quietly(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "stopped.py").write_text("def make():\n    raise KeyboardInterrupt")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", "stopped.py:make", "--schedule", "ddp"])
    assert stopped.value.code == 130
    assert capsys.readouterr().err.strip() == ""


def test_a_reader_that_leaves_early_sees_no_traceback() -> None:
    command = [sys.executable, "-m", "fxsched", "compare"]
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stdout is not None and run.stderr is not None
    run.stdout.close()
    assert run.stderr.read() in (
        "",
        "fxsched: importing PyTorch\n",
    )  # on a busy machine
    assert run.wait(timeout=100) == 1
