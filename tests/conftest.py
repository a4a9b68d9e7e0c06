"""Options and fixtures that all tests share."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tabulate import tabulate

from tests import traced_once

os.environ.setdefault("FXSCHED_CACHE", "")  # each run makes its own plans
os.environ["COLUMNS"] = "100"  # as where no terminal is; pytest-xdist has 80
GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden/ anew"
    )
    parser.addoption(
        "--quick", action="store_true", help="one case of each test that is not slow"
    )
    parser.addoption(
        "--short", action="store_true", help="not the tests that left_out.txt lists"
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """With --quick, keeps the first case of each test that isn't marked as slow.

    With --short, leaves out the tests that left_out.txt lists.
    """
    kept = {*items}
    if config.getoption("quick"):
        first = {item.nodeid.partition("[")[0]: item for item in reversed(items)}
        kept = {each for each in first.values() if not each.get_closest_marker("slow")}
    if config.getoption("short"):
        out = {*(Path(__file__).parent / "left_out.txt").read_text().splitlines()}
        kept = {item for item in kept if item.nodeid not in out}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints how models were cut, whether tests pass or not.

    A test adds a row with record_property("partition", row), a line with "balance" or
    "brute force"; that way those of pytest-xdist's processes get here too.
    """
    found: dict[str, list[object]] = {}
    for outcome in ("passed", "failed"):
        for test in terminalreporter.getreports(outcome):
            for name, value in test.user_properties:
                found.setdefault(name, []).append(value)
    for name in ("balance", "brute force"):
        for line in sorted(map(str, found.get(name, []))):
            terminalreporter.write_line(f"{name}: {line}")
    rows = found.get("partition")
    if rows:
        headers = "model|schedule|stages|bottleneck / mean|edges|bytes a microbatch"
        table = tabulate(sorted(rows), headers.split("|"), floatfmt=".2f", intfmt=",")
        terminalreporter.section("automatic split")
        terminalreporter.write_line(table)


@pytest.fixture(autouse=True, scope="module")
def _few_objects() -> None:
    """The garbage collector needn't look at what other files' tests have left."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="session")
def _stages_traced_once() -> Iterator[None]:
    """Plans of all tests of a process share the traces of their stages."""
    with traced_once.stages_traced_once():
        yield


@pytest.fixture
def stages_traced_anew() -> Iterator[None]:
    """For tests of tracing itself."""
    with traced_once.stages_traced_anew():
        yield


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """golden(name, text): the text must equal tests/golden/name.txt.

    `pytest --update-golden` writes the file instead; look at `git diff` after that.
    """

    def compare(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"no {path}; run pytest --update-golden"
        assert text == path.read_text(), f"{path} differs; see --update-golden"

    return compare
