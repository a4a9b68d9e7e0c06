"""The demo, run as a user runs it: by threads and under torchrun at the same time."""

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxsched import PlanError, schedules
from fxsched.cli import demo, demo_task
from fxsched.cli import main as cli
from tests.devices import find_devices

ROOT = Path(__file__).parents[2]
DEMO = "demo --schedule 1f1b --workers 2 --microbatches 2 --steps 2"
STALE = "demo --schedule stale_by_one --workers 2 --microbatches 4 --steps 4 --tables"
TORCHRUN = (
    "-m torch.distributed.run --nproc-per-node 2 --rdzv-backend c10d "
    "--rdzv-endpoint 127.0.0.1:0 "
)
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "COLUMNS": "80"}


def start(command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command.split()],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_here(arguments: str) -> str:
    """What a command prints, run by this process."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        cli.main(arguments.split())
    return output.getvalue()


@pytest.fixture(scope="module")
def printed() -> Iterator[dict[str, str]]:
    """What the demo prints, by transport; ranks run beside this process."""
    ranks = start(f"{TORCHRUN} -m fxsched {DEMO}")
    try:
        here = {
            "threads": run_here(f"{DEMO} --tables"),
            "stale": run_here(STALE),
        }
        text, errors = ranks.communicate(timeout=300)
        assert ranks.returncode == 0, errors
        yield here | {"torchrun": text, "errors": errors}
    finally:
        ranks.kill()


def numbers(pattern: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, text)]


TRANSPORTS = pytest.mark.parametrize("transport", ["threads", "torchrun"])


@pytest.mark.slow
@TRANSPORTS
def test_prints_data_and_a_picture_of_the_step(
    printed: dict[str, str], transport: str
) -> None:
    text = printed[transport]
    assert re.search(r"^data: [\d,]+ functions .* [\d,]+ more held out$", text, re.M)
    assert len(re.findall(r"^as planned, 1f1b: .*: step ", text, re.M)) == 1
    assert re.findall(r"^ +([01])  (?=.*F)(?=.*B)[\w. -]+$", text, re.M) == ["0", "1"]


@pytest.mark.slow
def test_a_short_table_of_stages_stands_for_the_plan(printed: dict[str, str]) -> None:
    text = printed["torchrun"]
    rows = re.findall(r"^(\d) +\S.*  (\d)  +(\S+) %$", text, re.M)
    assert [row[:2] for row in rows] == [("0", "0"), ("1", "1")]
    assert sum(float(share) for _, _, share in rows) == pytest.approx(100, abs=0.11)
    assert text.count("\n") <= 24 and max(map(len, text.splitlines())) <= 80


@pytest.mark.slow
def test_tables_are_the_plan_and_the_program_of_a_worker(
    printed: dict[str, str],
) -> None:
    text = printed["threads"]
    assert re.search(r"^1f1b: 2 workers, 2 microbatches, 2 stages", text, re.M)
    assert re.search(r"^stage +modules +parameters", text, re.M)
    assert re.search(r"^worker +stages +busy +sends +memory$", text, re.M)
    assert re.findall(r"^worker (\d+)$", text, re.M) == ["0"]
    for job in ("0F0", "0F1", "0B1", "0B0"):
        assert len(re.findall(rf"^\d+ +{job} ", text, re.M)) == 1


@pytest.mark.slow
@TRANSPORTS
def test_the_predicted_step_is_beside_the_measured_one(
    printed: dict[str, str], transport: str
) -> None:
    step = r"^F and B: predicted (\S+) (m?s), one core per .*; measured (\S+) (m?s), on"
    ((predicted, unit, measured, same),) = re.findall(step, printed[transport], re.M)
    assert float(predicted) > 0 < float(measured) and unit == same


@pytest.mark.slow
@TRANSPORTS
def test_prints_accuracies_above_chance(
    printed: dict[str, str], transport: str
) -> None:
    pattern = r"^accuracy (\w+) training: train (\S+), held-out (\S+) \(chance 0.500\)$"
    found = re.findall(pattern, printed[transport], re.M)
    assert [when for when, _, _ in found] == ["before", "after"]
    assert all(0.55 < float(share) <= 1 for _, *shares in found for share in shares)
    plain = r"^its state in plain PyTorch: train (\S+), held-out (\S+) "
    ((train, held_out),) = re.findall(plain, printed[transport], re.M)
    after = [float(share) for share in found[1][1:]]
    assert [float(train), float(held_out)] == pytest.approx(after, abs=2e-3)


@pytest.mark.slow
@TRANSPORTS
def test_differs_from_eager_by_rounding_only(
    printed: dict[str, str], transport: str
) -> None:
    found = re.findall(r"from eager: loss (\S+), gradients (\S+)", printed[transport])
    assert len(found) == 1
    assert max(map(float, found[0])) < 1e-5


def test_lines_of_the_demo_are_written_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(file)))
    demo.say("reading")
    assert file.getvalue() == b"reading\n"


def test_training_says_which_step_it_is_at(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Said(demo.Progress):
        def at(self, name: str, number: int = 0, of: int = 0) -> None:
            super().at(name, number, of)
            said.append(str(self))

    class Training:
        done, calls, updates = 0, 3, 1
        batches = SimpleNamespace(draw=lambda: ())

        def train(self, batch: object) -> float:
            self.done += 1
            return 0.5494

    monkeypatch.setattr(demo, "Progress", Said)
    task: Any = Training()
    demo.run_training(task)
    assert said[-1] == "training: loss 0.5494, step 3 of 3"


def test_help_says_a_default_once(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("simulate", "compare", "search", "plan", "demo"):
        with contextlib.suppress(SystemExit):
            cli.main([command, "--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert "--help" in text
        assert not re.findall(r"\[default: [^]]*\] \[default[^]]*\]", text), command


@pytest.mark.slow
def test_a_stale_demo_lowers_the_rate_and_equals_its_replay(
    printed: dict[str, str],
) -> None:
    text = printed["stale"]
    line = "learning rate 0.0005, for gradients that are up to 1 updates late"
    assert line in text and "updates every 2 microbatches" in text
    assert len(re.findall(r"[\d.]+ at step \d+", text)) == 1
    ((loss, parameters),) = re.findall(r"loss (\S+), parameters (\S+)", text)
    assert float(loss) < 1e-5 and float(parameters) < 1e-5


def test_rates_shrink_with_what_is_stable() -> None:
    late = [
        demo_task.staleness(schedule)
        for schedule in (
            schedules.one_f_one_b(4, 8),
            schedules.zero1(4, 8),
            schedules.pipedream_2bw(4, 16, 8),
            schedules.pipedream(4, 8),
        )
    ]
    assert late == [0, 0, 1, 3]
    shares = [demo_task.stable_share(each) for each in (0, 1, 2)]
    assert shares == pytest.approx([1, 1 / 2, (5**0.5 - 1) / 4])  # Idle Speculations


@pytest.mark.slow
def test_torchrun_prints_the_same_losses_as_threads(printed: dict[str, str]) -> None:
    threads, ranks = (
        numbers(r"(\d\.\d+) at ", printed[t]) for t in ("threads", "torchrun")
    )
    assert len(threads) == 2
    assert ranks == pytest.approx(threads, abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", r"Missing command; see .*"),
        ("demo --schedule nope", r"'nope' \(choose from ddp.*1f1b.*fslpp"),
        ("demo --steps 0", r"'--steps': 0 is not in the range x>=1; see "),
        ("demo --workers two", r"'--workers': 'two' is not a valid integer; see "),
        (
            "demo --schedule ddp --workers 3",
            r"--workers 3.*give --microbatches 6 or 9,",
        ),
        (
            "demo --schedule stale_by_one --workers 3",
            r"stale_by_one: an update every 3 microbatches: the demo's batch of 64 ",
        ),
        ("demo --microbatches 7", r"batch of 64 doesn't divide.*give 1, 2, 4, 8"),
        ("demo --device tpu", r"--device tpu: torch finds .* here; give --device cpu"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_is_allowed(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments.split())
    printed = capsys.readouterr()
    assert stopped.value.code == 2
    assert printed.out == ""
    said_last = re.sub("fxsched: .* s so far\n", "", printed.err)  # on a busy machine
    assert re.fullmatch(rf"python -m fxsched.*: error: .*{message}.*\n", said_last)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["demo", "--device", "cuda"])
    assert stopped.value.code == 2
    assert "no GPU here; give --device cpu\n" in capsys.readouterr().err


def test_a_bad_schedule_ends_the_process_with_code_2() -> None:
    run = start("-m fxsched demo --schedule nope")
    out, errors = run.communicate(timeout=100)
    assert (run.returncode, out, errors.count("\n")) == (2, "", 1)


def test_each_rank_of_a_host_takes_a_device_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And they share the devices, if there are fewer of them."""
    find_devices(monkeypatch, "xpu", 2)
    set_to: list[int] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", set_to.append)
    for rank, device in enumerate(("xpu:0", "xpu:1", "xpu:0")):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert demo_task.local_device("xpu") == device
        assert demo_task.local_device("cpu") == "cpu"
    assert set_to == [0, 1, 0]
    with pytest.raises(PlanError, match=r"finds xpu here; give --device cpu or xpu$"):
        demo_task.check(schedules.gpipe(1, 1), "cuda")
    demo_task.check(schedules.gpipe(1, 1), "xpu")
