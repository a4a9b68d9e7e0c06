"""What planning says: lines on stderr, logs of passes, a bar on a terminal."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import fxsched
from fxsched import progress, schedules

LINE = (
    r"planned in \d+\.\d s: 1f1b: 2 workers, 2 microbatches, 2 stages; "
    r"predicted step: [\d.]+ .s, bubble [\d.]+ %, at most [\d.]+ .?i?B a worker; "
    r"plan\.explain\(\) says why workers are idle"
)
PASSES = ("assign_stages", "split_stages", "differentiate_stages", "route_values")
SCRIPT = """
import torch, fxsched
step = torch.compile(
    torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)),
    backend=fxsched.backend(fxsched.schedules.one_f_one_b(2, 2)),
)
step(torch.ones(4, 4)).sum().backward()
"""


def step(**options: Any) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    schedule = schedules.one_f_one_b(2, 2)
    return torch.compile(model, backend=fxsched.backend(schedule, **options))


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(logging.root, "handlers", [])
    progress.LOG.setLevel(logging.NOTSET)
    yield
    progress.LOG.setLevel(logging.NOTSET)
    progress.LOG.handlers.clear()


@pytest.mark.slow
def test_a_backend_says_once_what_it_planned(capfd: Any) -> None:
    call = step()
    for rows in (4, 8, 8, 12):
        call(torch.ones(rows, 4)).sum().backward()
    error = capfd.readouterr().err
    assert re.fullmatch(rf"fxsched: {LINE}\n", error)
    with torch.no_grad():
        call(torch.ones(4, 4))
    assert "fxsched: planned without gradients in " in capfd.readouterr().err


def test_logging_that_is_set_up_decides(capfd: Any) -> None:
    call, log = step(), progress.LOG
    log.setLevel(logging.WARNING)
    call(torch.ones(4, 4))
    log.setLevel(logging.NOTSET)
    stream = io.StringIO()
    log.addHandler(logging.StreamHandler(stream))
    call(torch.ones(8, 4))
    assert stream.getvalue() == ""  # the root's level is WARNING
    log.setLevel(logging.INFO)
    for rows in (12, 16):
        call(torch.ones(rows, 4))
    assert len(re.findall(LINE, stream.getvalue())) == 2
    assert capfd.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["+fxsched", "-fxsched"])
def test_TORCH_LOGS_sets_the_level(setting: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"TORCH_LOGS": setting},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    said = [re.search(rf"\] after {name} \(", ran.stderr) for name in PASSES]
    if setting == "-fxsched":
        assert "planned" not in ran.stderr and not any(said)
    else:
        assert len(re.findall(LINE, ran.stderr)) == 1
        places = [match.start() for match in said if match]
        assert len(places) == len(PASSES) and places == sorted(places)
        assert "] after trace (" in ran.stderr and "message 0: " in ran.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("where", ["terminal", "notebook", "file"])
def test_what_takes_long_has_a_bar_or_elsewhere_a_line(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Terminal() if where == "terminal" else io.StringIO()
    if where == "notebook":
        monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    bar = where != "file"
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "PATIENCE", 0.2)
    monkeypatch.setattr(progress, "TICK", 0.01)
    with progress.Progress() as planning:
        planning.at("assign_stages", 2, 9)
        end = time.monotonic() + 10
        while "assign_stages" not in stream.getvalue():
            assert time.monotonic() < end
    said = stream.getvalue()
    if not bar:
        assert said == "fxsched: planning: assign_stages, 2 of 9, 0.2 s so far\n"
        return
    assert "planning: assign_stages, 2 of 9, 00:00" in said
    assert said.rpartition("\r")[0].rpartition("\r")[2].strip() == ""  # it is gone


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_what_is_quick_has_none(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.Progress() as planning:
        planning.at("assign_stages")
    assert stream.getvalue() == ""


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_other_ranks_than_0_print_no_line(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    with progress.Progress() as planning:
        planning.at("assign_stages")
        assert planning._thread is None
    assert stream.getvalue() == ""


def test_lines_go_on_until_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    monkeypatch.setattr(progress, "PATIENCE", 0.1)
    monkeypatch.setattr(progress, "EVERY", 0.01)
    with pytest.raises(ValueError), progress.Progress("search") as searching:
        for number in (1, 2):
            searching.at(f"planning {number} of 2 candidates")
            with progress.Progress("tracing the model"):  # is a part of the search
                end = time.monotonic() + 10
                while f"search: planning {number} of 2" not in stream.getvalue():
                    assert time.monotonic() < end
        raise ValueError
    assert searching._thread is not None and not searching._thread.is_alive()
    assert "tracing" not in stream.getvalue()


def test_planning_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[int, ...]] = []
    at = lambda self, name, *numbers: said.append(numbers)  # noqa: E731
    monkeypatch.setattr(progress.Progress, "at", at)
    fxsched.plan(nn.Linear(4, 4), schedules.gpipe(1, 1), torch.ones(4, 4))
    numbers = [number for number, _ in filter(None, said)]
    assert numbers == [*range(1, said[-1][1] + 1)]


def test_tracing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            end = time.monotonic() + 10
            while "tracing the model, 0 s so far" not in stream.getvalue():
                assert time.monotonic() < end
            return super().forward(x)

    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    with fxsched.backend(schedules.ddp(1, 1)).tracing():
        Slow(4, 4)(torch.ones(4, 4))


@pytest.mark.parametrize("quiet", [True, False])
def test_search_says_what_it_does(
    quiet: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress, "EVERY", 0.001)
    times = {"F": 1, "B": 1, "W": 1}
    fxsched.search(times, 4, 8, effort=0.1, quiet=quiet)
    said = capsys.readouterr().err
    for what in (r"simulating \d+ of \d+ schedules", r"looking for orders of jobs, \d"):
        assert bool(re.search(f"^fxsched: search: {what}", said, re.M)) is not quiet


def test_a_terminal_of_no_columns_has_a_bar() -> None:
    """As some containers and notebooks report; its clock moves too."""
    pty, fcntl, termios = map(pytest.importorskip, ("pty", "fcntl", "termios"))
    script = """
import time
from fxsched import progress
progress.PATIENCE = progress.TICK = 0.1
with progress.Progress("search") as searching:
    searching.at("planning 1 of 2 candidates")
    time.sleep(1.5)
"""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, bytes(8))
    subprocess.run([sys.executable, "-c", script], stderr=its, check=True, timeout=100)
    os.close(its)
    said = os.read(ours, 4096).decode()
    for clock in ("00:00", "00:01"):
        assert f"search: planning 1 of 2 candidates, {clock}" in said
